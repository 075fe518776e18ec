"""What operators call and look at: the admin service, the page, pair probes, the feed of the cluster's state."""
