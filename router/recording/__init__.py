"""Recordings of a router core's events, and their replay."""
