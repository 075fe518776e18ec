"""Continuous batching: the scheduler and the engine's state machine. Pure."""
