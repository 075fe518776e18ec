"""`python -m tests.acceptance.bad_input`: see refusals.py."""

from tests.acceptance.bad_input.refusals import main

if __name__ == "__main__":
    main()
