"""Commands of operators, which show a running cluster and change it."""
