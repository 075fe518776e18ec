"""The load generator, which sends requests and records the answers: Locust, and a fake server to test it."""
