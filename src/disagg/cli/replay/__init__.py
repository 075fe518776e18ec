"""`disagg replay`: recordings of a router's events."""
