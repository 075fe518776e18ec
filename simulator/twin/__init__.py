"""The twin of a cluster that serves: what came lately is replayed under other settings, and the better one is chosen.
Pure."""
