"""What becomes of a batch whose gateway is killed."""
