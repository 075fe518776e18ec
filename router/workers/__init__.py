"""What the router knows of each worker: capacity, load, cached prefixes, step times, health. Pure."""
