"""Virtual time, and the events in it: users, gateway, links, machines. Pure."""
