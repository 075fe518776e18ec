"""Streams and sockets: gRPC channels, framed connections, their handshake, and the guard of a server."""
