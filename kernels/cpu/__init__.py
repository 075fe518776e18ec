"""C++ kernels for CPUs, compiled at first use with any C++ compiler on PATH, and loaded with ctypes."""
