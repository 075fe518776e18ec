"""The controller of a cluster: its pure core, its server, and the links of those who belong to it."""
