"""The worker process: its engine thread, its roles, its service."""
