"""`python -m benchmarks.bad_input`: see refusals.py."""

from benchmarks.bad_input.refusals import main

if __name__ == "__main__":
    main()
