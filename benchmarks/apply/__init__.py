"""What requests see of `disagg apply`; see `command.py`."""
