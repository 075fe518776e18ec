"""What operators call and look at: the admin service, the page, the feed of the cluster's state."""
