"""What is sent and when: scenarios, arrivals, traces. Pure."""
