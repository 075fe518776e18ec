"""What runs the guardrails: it asks judges and services, and keeps their time limits."""
