"""How fast does KV move, and what does a stream see of its hand-over?"""
