"""How bytes of KV travel between two workers: gloo, NCCL, NIXL, shared memory, within one process; `auto` chooses."""
