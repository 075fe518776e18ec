"""`python -m benchmarks.faults`: see promises.py."""

import sys

from benchmarks.faults.promises import main

if __name__ == "__main__":
    sys.exit(main())
