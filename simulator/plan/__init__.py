"""What a model needs and can do on a device, and which pools serve a workload within its limits. Pure."""
