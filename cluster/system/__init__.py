"""The operating system: processes, cores, logs, the terminal."""
