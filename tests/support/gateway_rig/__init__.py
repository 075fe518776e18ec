"""A gateway process between clients and a worker that sends at a fixed pace, without a cluster around it."""
