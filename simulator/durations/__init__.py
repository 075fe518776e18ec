"""How long an engine step takes: fitted from recorded steps, or computed from the shape of a model."""
