"""How fast and how right the simulator is."""
