"""Checkpoints on disk: configuration, tensors, conversion."""
