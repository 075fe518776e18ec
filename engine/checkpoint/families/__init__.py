"""The families of models, one function each: from the fields of config.json to a `ModelConfig`, and the names of the
checkpoint's tensors. Pure."""
