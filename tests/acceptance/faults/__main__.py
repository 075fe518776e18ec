"""`python -m tests.acceptance.faults`: see promises.py."""

import sys

from tests.acceptance.faults.promises import main

if __name__ == "__main__":
    sys.exit(main())
