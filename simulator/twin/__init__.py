"""The twin of a running cluster: it replays the latest requests under other settings and chooses the best setting.
Pure."""
