"""The sections of `make gpu-check` that measure; scripts/gpu_check.py runs them."""
