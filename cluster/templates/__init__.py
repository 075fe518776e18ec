"""Processes that have loaded code and weights, and fork those of the cluster (ADR 55)."""
