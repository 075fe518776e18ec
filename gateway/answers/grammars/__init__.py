"""Verdicts on clients' grammars, from a process that may die of them."""
