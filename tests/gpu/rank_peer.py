"""One rank of a worker of two, as a process: `python -m tests.gpu.rank_peer RANK DEVICE FOLDER PROMPT ANSWER`.

Rank 0 prints its address first, which rank 1 reads from its standard input. Both compute the prompt and then the answer
token by token, rank 1 with the tokens that rank 0 is to sample. PROMPT and ANSWER are lists in JSON. Each ends with a
line of JSON: what it sampled, how many decode steps it captured, and why one was not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from disagg.engine.config import WorkerConfig
from disagg.engine.io.rendezvous import RendezvousServer
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.runner.collectives import make_collective
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.sharding.shards import Shard
from tests.gpu.conftest import dump_stacks_later
from tests.support.secret import SECRET
from tests.support.stepping import last_token, make_sequence

HOST = "127.0.0.1"
SIZE = 2


def main(rank_text: str, device_name: str, folder: str, prompt_text: str, answer_text: str) -> None:
    dump_stacks_later(f"rank-{rank_text}")
    rank, prompt, answer = int(rank_text), json.loads(prompt_text), json.loads(answer_text)
    if torch.device(device_name).index is not None:
        torch.cuda.set_device(torch.device(device_name))
    config = WorkerConfig(
        worker_id="gpu-check",
        roles=("prefill", "decode"),
        model_path=str(Path(folder)),
        device=device_name,
        dtype="float32",
        num_blocks=64,
        max_num_seqs=2,
        tp=SIZE,
    )
    runner = TorchModelRunner(config, Shard(rank, SIZE))
    server = RendezvousServer(HOST, SECRET) if rank == 0 else None
    if server is not None:
        print(server.address, flush=True)
    address = server.address if server is not None else sys.stdin.readline().strip()
    collective = make_collective(device_name, address, SECRET, runner.shard, HOST)
    runner.join(collective, runner.num_blocks)
    errors = [runner.capture(num_seqs) for num_seqs in runner.capture_sizes]
    sequence = make_sequence(prompt, [9, 2, 31, 0, 17, 5])
    sampled: list[int] = []
    for number, token_id in enumerate(answer):
        first = StepPlan(prefills=(ScheduledSequence(sequence, 0, len(prompt), samples=True),))
        plan = StepPlan(decodes=(last_token(sequence),)) if number else first
        arrays: Any = runner.arrays(plan)
        if rank == 0:
            sampled += runner.step(plan, arrays).token_ids
        else:
            runner.compute(arrays)
        sequence.token_ids.append(token_id)
    if torch.device(device_name).type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"sampled": sampled, "captured": len(runner.capture_sizes), "errors": errors}), flush=True)
    sys.stdin.read()  # until it is told to go: who leaves early ends the exchange of the other
    runner.drop_captures()
    collective.close()
    if server is not None:
        server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
