"""The hand-over of a sequence from a prefill worker (P) to a decode worker (D).

    sender.py, receiver.py   the two halves, pure state machines: inputs in, effects out
    effects.py               what they ask of their worker
    chunks.py                how a prompt is cut into payloads
    transport.py             how bytes move, as an interface; local.py, gloo.py, nccl.py carry it out
    checksum.py              the checksum of a payload

Control messages travel on one ordered stream per pair. Bytes travel on the pair's transport, strictly in the order in
which D sent ClearToSend. D receives into staging slots, verifies, and its own engine scatters into the cache: no peer
ever writes to a cache.
"""
