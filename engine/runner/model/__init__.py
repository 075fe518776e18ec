"""The decoder of the Llama family, in plain torch over `disagg.kernels.dispatch`."""
