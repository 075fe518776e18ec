"""The needs and the performance of a model on a device, and the pools that serve a workload within its limits. Pure."""
