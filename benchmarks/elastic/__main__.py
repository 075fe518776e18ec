"""`python -m benchmarks.elastic`: see command.py."""

from benchmarks.elastic.command import main

if __name__ == "__main__":
    main()
