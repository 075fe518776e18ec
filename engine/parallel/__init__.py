"""Tensor parallelism: several rank processes that are one worker.

    interfaces.py   rank 0's followers, one rank's runner and its transports, as protocols
    messages.py     the messages between rank 0 and its followers (pure)
    factories.py    makes the runner of a rank, and the collective of all ranks
    group.py        rank 0: forms the ranks and ends them
    followers.py    rank 0: its connections to the followers
    leader.py       rank 0: a `ModelRunner` over all ranks
    follower.py     ranks 1 and up: carry out the commands of rank 0, in order
    staging.py      staging buffers, of which each rank has a part
    channels.py     one rank's byte channels of a pair, one for each rank of the other worker with a common slice
    transport.py    a pair's byte channel over all ranks

Which heads, columns and rows each rank has: `engine/sharding/`. What ranks exchange inside a step:
`engine/runner/collectives.py`. Connections: `engine/io/`.

Rank 0 alone has the scheduler, the roles and sockets to the outside. All ranks end together: a rank that is lost ends
the worker, which is started again as a whole.
"""
