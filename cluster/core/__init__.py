"""The controller's decisions: the desired processes, and the next steps towards them. Pure."""
