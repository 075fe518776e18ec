"""The Triton kernels through Triton's compiler and launcher, against a CUDA driver that does nothing."""
