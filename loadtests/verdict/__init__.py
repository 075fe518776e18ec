"""From recorded requests to goodput: records, targets, comparison, reports. Pure."""
