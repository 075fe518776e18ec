"""Users that send requests and record the answers: Locust, and a fake server to try it on."""
