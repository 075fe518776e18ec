"""What reads keys and certificates, watches their files, and checks a caller's rights on a gRPC call."""
