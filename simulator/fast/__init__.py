"""Workers whose engine is a few numbers. Pure."""
