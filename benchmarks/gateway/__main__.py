"""`python -m benchmarks.gateway`: see command.py."""

from benchmarks.gateway.command import main

if __name__ == "__main__":
    main()
