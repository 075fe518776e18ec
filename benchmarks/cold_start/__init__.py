"""How long a cluster takes from the start of its command until it answers, and a worker until it is back."""
