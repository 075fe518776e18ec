"""How long an engine step takes: fitted from recorded steps, or computed from a model's shape and a device's numbers."""
