"""`disagg chat`: a conversation in the terminal."""
