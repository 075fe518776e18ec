"""`python -m benchmarks.structured`: see command.py."""

from benchmarks.structured.command import main

if __name__ == "__main__":
    main()
