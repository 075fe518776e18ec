"""The router's I/O: clock, sockets, streams to workers."""
