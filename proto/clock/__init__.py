"""The clock by which processes judge each other."""
