"""`python -m benchmarks.serving`: see throughput.py."""

from benchmarks.serving.throughput import main

if __name__ == "__main__":
    main()
