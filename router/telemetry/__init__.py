"""What the router records of requests for operators: sums, traces, spans. Pure."""
