"""Tensor parallelism: several rank processes that are one worker.

    shards.py       pure: which heads, columns and rows of the model a rank has
    slices.py       pure: which rank of P sends which KV heads to which rank of D
    collective.py   what the ranks of a worker tell each other inside a step
    link.py         rank 0, which leads, and its followers, as interfaces
    messages.py     what they tell each other; connection.py, handshake.py: over which connection, and who may
    group.py        rank 0: how the ranks come together and end; muster.py takes them in, followers.py talks to them
    leader.py       rank 0: a `ModelRunner` over all ranks; staging.py: its buffers, of which each rank has a part
    follower.py     ranks 1 and up: carry out what rank 0 says, in its order
    routes.py       pure: what each rank of a pair has of a chunk
    channels.py     one rank's byte channels of a pair, one for each rank of the other worker with a common slice
    transport.py    a pair's byte channel over all ranks

Rank 0 alone has scheduler, roles and sockets to the outside. All ranks live and die together: a rank that is lost ends
the worker, which is started again as a whole.
"""
