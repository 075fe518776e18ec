"""The twin of a cluster as a process: it looks at a gateway, compares settings, and sets the better one."""
