"""The shell of the controller: its server, the links of those who belong to it, and how processes are started."""
