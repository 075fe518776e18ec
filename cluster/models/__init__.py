"""Models by name, and their files."""
