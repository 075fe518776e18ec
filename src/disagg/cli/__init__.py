"""The `disagg` command."""
