"""`disagg doctor`: is this machine, is this cluster as it should be."""
