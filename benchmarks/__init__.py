"""Scripts that measure, print one table each, and write `--json FILE` in one form; see benchmarks/common.py."""
