"""The HTTP server: connections, their protocol, and one exchange of a request and its answer."""
