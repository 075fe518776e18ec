"""`python -m benchmarks.apply`: see command.py."""

import sys

from benchmarks.apply.command import main

if __name__ == "__main__":
    sys.exit(main())
