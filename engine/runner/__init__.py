"""Executes a planned step on a device: model, sampler, KV cache."""
