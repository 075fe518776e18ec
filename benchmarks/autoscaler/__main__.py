"""`python -m benchmarks.autoscaler`: see command.py."""

import sys

from benchmarks.autoscaler.command import main

if __name__ == "__main__":
    sys.exit(main())
