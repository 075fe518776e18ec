"""`python -m benchmarks.simulator`: see command.py."""

from benchmarks.simulator.command import main

if __name__ == "__main__":
    main()
