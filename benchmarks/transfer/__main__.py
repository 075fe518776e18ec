"""`python -m benchmarks.transfer`: see command.py."""

from benchmarks.transfer.command import main

if __name__ == "__main__":
    main()
