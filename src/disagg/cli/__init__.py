"""Command line of the `disagg` program."""
