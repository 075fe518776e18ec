"""A request's way through the router: the state machines and what they decide. Pure."""
