"""A cluster on Ray: actors, placement, standing clusters."""
