"""The services for operators: the admin service, the page, probes, and the feed of the cluster's state."""
