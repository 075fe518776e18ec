"""The GPU kernels, in Triton, one op a file; `ops.TritonOps` is what `disagg.kernels.dispatch` calls."""
