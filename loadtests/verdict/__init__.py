"""Evaluation of recorded requests: records, targets, comparison, reports. Pure."""
