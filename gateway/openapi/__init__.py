"""The description of the HTTP API: every operation, with what its body may have and what its answers have."""
