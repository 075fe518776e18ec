"""What an operator may set about kernels, read from the environment: switches and shapes. Pure."""
