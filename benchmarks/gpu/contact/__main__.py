"""Make contact with a GPU."""

from __future__ import annotations

import sys

from benchmarks.gpu.contact.runner import main

if __name__ == "__main__":
    sys.exit(main())
