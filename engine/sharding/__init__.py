"""Which part of weights, heads and KV blocks each rank holds. Pure."""
