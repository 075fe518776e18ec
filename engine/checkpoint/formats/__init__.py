"""Published formats of weights: what `quantization_config` of a config.json says, and how tensors are read."""
