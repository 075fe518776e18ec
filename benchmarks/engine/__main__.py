"""`python -m benchmarks.engine`: see steps.py."""

from benchmarks.engine.steps import main

if __name__ == "__main__":
    main()
