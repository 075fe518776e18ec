"""The state of each worker: capacity, load, cached prefixes, links, health. Pure."""
