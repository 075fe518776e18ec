"""KV memory: blocks, prefix cache, swap space. Pure."""
