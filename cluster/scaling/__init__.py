"""Observes a running cluster and resizes its pools, as `autoscaler/` decides."""
