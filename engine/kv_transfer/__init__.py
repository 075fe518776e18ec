"""The hand-over of a sequence from a prefill worker (P) to a decode worker (D).

    sender.py, receiver.py    the two halves, pure state machines: inputs in, commands out
    send_window.py, receive_window.py    attempts and chunks of each half: records, transition tables, staging slots
    pair_half.py              what both halves have in common
    commands.py               what they have their worker do
    pair_shell.py             carries that out around a half, by a `PairIo`
    transports/               how bytes move: an interface, and gloo, NCCL, shared memory, or one process

Control messages travel on one ordered stream per pair. Bytes travel on the pair's transport, strictly in the order in
which D sent ClearToSend. D receives into staging slots, verifies, and its own engine scatters into the cache: no peer
ever writes to a cache.
"""
