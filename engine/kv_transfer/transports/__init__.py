"""How bytes of KV travel between two workers: gloo, NCCL, shared memory, in one process."""
