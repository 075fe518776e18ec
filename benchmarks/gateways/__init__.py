"""What several gateway processes are worth; see `command.py`."""
