"""The decoder of all families, in plain torch over `disagg.kernels.dispatch`."""
