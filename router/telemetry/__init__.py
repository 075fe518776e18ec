"""What the router counts and remembers for operators: telemetry, spans, traces, statistics. Pure."""
