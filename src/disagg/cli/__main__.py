"""`python -m disagg.cli` is the `disagg` program."""

from __future__ import annotations

from disagg.cli.main import main

if __name__ == "__main__":
    main()
