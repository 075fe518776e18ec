"""Workloads of load tests: scenarios, arrivals, traces. Pure."""
