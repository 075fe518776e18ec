"""Commands of operators: what a running cluster is, and what they change about it."""
