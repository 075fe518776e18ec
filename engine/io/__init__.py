"""Threads, sockets and process groups of a worker."""
