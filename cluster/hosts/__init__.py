"""The processes of a cluster: workers, their ranks, gateways, and a cluster of them on this host."""
