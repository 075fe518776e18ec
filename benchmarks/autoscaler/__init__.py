"""Sizes that policies choose over changing load, beside the cheapest static size, in virtual time."""
