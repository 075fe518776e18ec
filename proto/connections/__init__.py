"""How the processes of one cluster connect to each other."""
