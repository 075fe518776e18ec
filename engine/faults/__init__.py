"""Injected faults: failpoints, and the parts that they wrap."""
