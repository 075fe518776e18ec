"""`python -m benchmarks.cold_start`: see command.py."""

import sys

from benchmarks.cold_start.command import main

if __name__ == "__main__":
    sys.exit(main())
