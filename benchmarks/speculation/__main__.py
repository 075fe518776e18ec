"""`python -m benchmarks.speculation`: see command.py."""

from benchmarks.speculation.command import main

if __name__ == "__main__":
    main()
