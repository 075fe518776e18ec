"""`python -m benchmarks.slow_times`: see command.py."""

from benchmarks.slow_times.command import main

if __name__ == "__main__":
    main()
