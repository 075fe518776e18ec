"""Guarantees against real clusters and against the parts that give them: programs, which pytest does not collect."""
