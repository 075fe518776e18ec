"""`python -m benchmarks.batches`: see command.py."""

import sys

from benchmarks.batches.command import main

if __name__ == "__main__":
    sys.exit(main())
