"""The order in which waiting requests are served: fair by tenant, within limits. Pure."""
