"""Load clients that several benchmarks share."""
