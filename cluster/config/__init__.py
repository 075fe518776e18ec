"""The cluster's configuration file."""
