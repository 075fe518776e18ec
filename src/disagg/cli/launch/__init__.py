"""Display of a cluster's start, and choices that are made then."""
