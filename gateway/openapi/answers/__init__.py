"""What the answers of the HTTP API have, as structs that only the document uses: answers are written without them."""
