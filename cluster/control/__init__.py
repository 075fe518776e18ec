"""The shell of the controller: its server, the connections of workers and gateways to it, and the start of
processes."""
