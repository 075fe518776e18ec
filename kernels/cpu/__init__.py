"""C++ kernels for CPUs, compiled at first use with whatever compiler is there, and loaded with ctypes."""
