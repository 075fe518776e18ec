"""KV in memory beside the device cache, by content: what is kept where, what is written, and what is loaded. Pure."""
