"""`disagg replay`: replays recordings of a router's events."""
