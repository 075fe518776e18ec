"""The OpenAI-compatible HTTP server: JSON and server-sent events in front of the same generator as gRPC.

    socket ─ protocol ─> app: key, route ─> body ─ schema, to_input ─> Generator.run ─> chunks ─> socket

`server` owns the sockets, `app` the routes; everything between is a translation and decides nothing.
"""
