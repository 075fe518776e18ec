"""The state of each worker: capacity, load, cached prefixes, step times, health. Pure."""
