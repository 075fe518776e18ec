"""The router's edge: clock, sockets, streams to workers."""
