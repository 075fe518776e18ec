"""What is shown while a cluster starts, and what is decided then."""
