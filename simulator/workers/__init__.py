"""Workers that only take time. Pure."""
