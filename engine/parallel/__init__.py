"""Tensor parallelism: several rank processes that are one worker.

    shards.py       pure: which heads, columns and rows of the model a rank has
    slices.py       pure: which rank of P sends which KV heads to which rank of D
    collective.py   what the ranks of a worker tell each other inside a step
    link.py         the line between rank 0, which leads, and each follower
    leader.py       rank 0: a `ModelRunner` over all ranks
    follower.py     ranks 1 and up: carry out what rank 0 says, in its order
    transport.py    a pair's byte channels, one for each two ranks that have something to send each other

Rank 0 alone has scheduler, roles and sockets to the outside. All ranks live and die together: a rank that is lost ends
the worker, which is started again as a whole.
"""
