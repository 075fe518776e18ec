"""`python -m benchmarks.gateways`: see command.py."""

from benchmarks.gateways.command import main

if __name__ == "__main__":
    main()
