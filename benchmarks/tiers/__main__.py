"""`python -m benchmarks.tiers`: see command.py."""

from benchmarks.tiers.command import main

if __name__ == "__main__":
    main()
