"""Virtual time, and all that happens in it: users, gateway, links, the cluster. Pure."""
