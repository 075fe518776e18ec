"""What is generated for a request, and what of it goes to the client."""
