"""`python -m benchmarks.guardrails`: see command.py."""

from benchmarks.guardrails.command import main

if __name__ == "__main__":
    main()
