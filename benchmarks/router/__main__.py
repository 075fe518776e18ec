"""`python -m benchmarks.router`: see command.py."""

from benchmarks.router.command import main

if __name__ == "__main__":
    main()
