"""What does it bring that workers choose by targets what a fixed setting decides elsewhere? In virtual time."""
