"""The gRPC service itself: its calls, the decoding of their messages, and what is checked before each."""
