"""What is found out about a GPU: sections that measure, and `contact`, which runs them and the tests."""
