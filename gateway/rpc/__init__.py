"""The gRPC services of the gateway."""
