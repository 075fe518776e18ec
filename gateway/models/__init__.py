"""The models that a gateway serves: their routers, members and changes."""
