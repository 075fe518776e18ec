"""What runs on the event loop and beside it: turns, threads for long work, heartbeat and watch."""
