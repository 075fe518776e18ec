"""What the router counts and remembers for operators: journal, spans, traces, statistics. Pure."""
