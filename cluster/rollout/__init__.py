"""Changes of a running cluster: what a new configuration changes, and in which order workers are replaced for it."""
