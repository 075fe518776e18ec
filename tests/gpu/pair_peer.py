"""One side of a pair, as a process: `python -m tests.gpu.pair_peer SIDE SCENARIO DEVICE FOLDER [TRANSPORT]`.

The receiver prints its address first, which the sender reads from its standard input; each side prints `connected` when
its pairs are formed, and ends with one line of JSON that says what it saw. Without a transport's name, over NCCL where
the device is `cuda`, over gloo on a CPU.

    payloads   three messages arrive to the bit
    pairs      several pairs of the same two processes: every receive is posted before anything is sent, and the pairs
               are served in the other order
    hand-over  the KV of a prompt arrives, and decodes on
    abort      nothing is sent: the receiver closes the pair, and its receive is answered
    kill       the same, but the sender is killed while the receive waits
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from disagg.engine.config import STAGED_ON_DEVICE, TransportName
from disagg.engine.kv_transfer.transport import PairTransport
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.plan import Buffer, Copying
from disagg.engine.runner.model_runner import TorchModelRunner
from tests.gpu.conftest import dump_stacks_later
from tests.support.secret import SECRET, checksum
from tests.support.stepping import decode, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE

NUM_PAIRS = 12
"""More than the pairs that exhaust a pool of 32 streams at three of them each."""
PAYLOAD_BYTES = (1, 4096, (8 << 20) + 5)
PROMPT = [(11 * i * i + 2 * i + 1) % VOCAB_SIZE for i in range(75)]
NUM_TOKENS = 12
ANSWER_S = 30.0
HOST = "127.0.0.1"


class Side:
    """A transport whose operations are waited for."""

    def __init__(self, transport: PairTransport, device: torch.device, name: TransportName) -> None:
        self.transport = transport
        self._device = device if name in STAGED_ON_DEVICE else torch.device("cpu")

    def buffer(self, content: torch.Tensor) -> Buffer:
        """A staging buffer with this content."""
        return content.to(self._device) if self._device.type == "cuda" else content.numpy()

    def send(self, buffer: Buffer, nbytes: int) -> list[Any]:
        """The answer, (ok, error)."""
        return self._wait(lambda done: self.transport.send(buffer, nbytes, done))

    def recv(self, buffer: Buffer, nbytes: int) -> list[Any]:
        """The answer, (ok, error, checksum)."""
        return self._wait(lambda done: self.transport.recv(buffer, nbytes, done))

    def _wait(self, start: Any) -> list[Any]:
        answer: list[Any] = []
        came = threading.Event()

        def done(*values: Any) -> None:
            answer.extend(values)
            came.set()

        start(done)
        return answer if came.wait(ANSWER_S) else ["no answer"]


def payload(nbytes: int) -> torch.Tensor:
    """Bytes that differ from place to place."""
    return (torch.arange(nbytes, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)


def send_payloads(side: Side) -> dict[str, Any]:
    return {"ok": all(side.send(side.buffer(payload(nbytes)), nbytes)[0] for nbytes in PAYLOAD_BYTES)}


def receive_payloads(side: Side) -> dict[str, Any]:
    same = []
    for nbytes in PAYLOAD_BYTES:
        buffer = side.buffer(torch.zeros(nbytes, dtype=torch.uint8))
        ok = side.recv(buffer, nbytes)[0]
        same.append(ok is True and torch.equal(torch.as_tensor(buffer).cpu(), payload(nbytes)))
    return {"ok": all(same)}


def send_in_reverse(sides: list[Side]) -> dict[str, Any]:
    contents = [side.buffer(payload(4096 + number)) for number, side in enumerate(sides)]
    sent = [sides[number].send(contents[number], 4096 + number)[0] for number in reversed(range(len(sides)))]
    return {"ok": sent == [True] * len(sides)}


def receive_all(sides: list[Side]) -> dict[str, Any]:
    """Each in a thread of its own, because `recv` waits."""
    buffers = [side.buffer(torch.zeros(4096 + number, dtype=torch.uint8)) for number, side in enumerate(sides)]
    with ThreadPoolExecutor(len(sides)) as pool:
        answers = list(pool.map(lambda n: sides[n].recv(buffers[n], 4096 + n)[0], range(len(sides))))
    same = [torch.equal(torch.as_tensor(got).cpu(), payload(4096 + number)) for number, got in enumerate(buffers)]
    return {"ok": answers == same == [True] * len(sides)}


def send_kv(side: Side, runner: TorchModelRunner) -> dict[str, Any]:
    sequence = make_sequence(PROMPT, [9, 2, 31, 0, 17])
    token_id = int(prefill(runner, sequence).argmax())
    nbytes = len(PROMPT) * runner.layout.bytes_per_token
    buffer = runner.new_staging(nbytes)
    begun = runner.start_gather(sequence.block_table, 0, len(PROMPT), buffer, digests=runner.digests)
    announced = begun if isinstance(begun, int) else checksum_of(begun)
    ok = side.send(buffer, nbytes)[0]
    return {"ok": ok, "checksum": announced, "token_id": token_id, "transport": side.transport.name}


def receive_kv(side: Side, runner: TorchModelRunner) -> dict[str, Any]:
    """Decodes from the first token on, which is computed here too, from the KV that came. Where devices compute digests
    the checksum is that of what arrived on the device."""
    nbytes = len(PROMPT) * runner.layout.bytes_per_token
    buffer = runner.new_staging(nbytes)
    if runner.digests:
        side.transport.skip_checksums()
    ok, _, arrived = side.recv(buffer, nbytes)
    table = [3, 1, 4, 8, 5, 6]
    copying = runner.start_scatter(table, 0, len(PROMPT), buffer, digests=runner.digests)
    if copying is not None and runner.digests:
        arrived = checksum_of(copying)
    sequence = make_sequence(PROMPT, table)
    decode(runner, [sequence], NUM_TOKENS)
    return {"ok": ok, "checksum": arrived, "token_ids": sequence.token_ids[len(PROMPT) :]}


def checksum_of(copying: Copying) -> int:
    """Of a copy, when it is done."""
    copying.wait()
    return copying.checksum()


def wait_in_vain(side: Side, close_after_s: float) -> dict[str, Any]:
    """A receive that nobody serves; closing the pair must answer it."""
    buffer = side.buffer(torch.zeros(1 << 20, dtype=torch.uint8))
    closer = threading.Timer(close_after_s, side.transport.close)
    closer.start()
    began = time.monotonic()
    answer = side.recv(buffer, 1 << 20)
    took_s = time.monotonic() - began
    closer.join()
    return {"ok": answer[0] is False, "answer": answer, "took_s": took_s}


def pair_names(scenario: str) -> list[str]:
    """In the order in which both sides form them."""
    return [f"{scenario}-{number}" for number in range(NUM_PAIRS if scenario == "pairs" else 1)]


def on_new_thread(device: torch.device, form: Callable[[], PairTransport]) -> PairTransport:
    """A pair, formed as in serving: on a new thread, which has no CUDA context. There every device has index 0; any
    other index must be set, which binds its context."""

    def run() -> PairTransport:
        if device.index:
            torch.cuda.set_device(device)
        return form()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def main(side_name: str, scenario: str, device_name: str, folder: str, transport: str = "") -> None:
    dump_stacks_later(f"{side_name}-{scenario}")
    device = torch.device(device_name)
    if device.index is not None:
        torch.cuda.set_device(device)
    name = cast(TransportName, transport or ("nccl" if device.type == "cuda" else "gloo"))
    runner: TorchModelRunner | None = None
    if scenario == "hand-over":
        runner = make_runner(Path(folder), device=device_name, max_num_seqs=2, transport=name)
        runner.checksum = checksum
    if side_name == "receiver":
        rendezvous = make_rendezvous(name, HOST, SECRET)
        print(rendezvous.address, flush=True)
        forms = [partial(rendezvous.accept, pair_name) for pair_name in pair_names(scenario)]
        sides = [Side(on_new_thread(device, form), device, name) for form in forms]
        side = sides[0]
        print("connected", flush=True)
        if scenario == "pairs":
            found = receive_all(sides)
        elif scenario == "payloads":
            found = receive_payloads(side)
        elif runner is not None:
            found = receive_kv(side, runner)
        else:
            found = wait_in_vain(side, 3.0)
        rendezvous.close()
    else:
        connect, address = make_connector(name, HOST, SECRET), sys.stdin.readline().strip()
        forms = [partial(connect, pair_name, address) for pair_name in pair_names(scenario)]
        sides = [Side(on_new_thread(device, form), device, name) for form in forms]
        side = sides[0]
        print("connected", flush=True)
        if scenario == "pairs":
            found = send_in_reverse(sides)
        elif scenario == "payloads":
            found = send_payloads(side)
        elif runner is not None:
            found = send_kv(side, runner)
        else:
            found = {"ok": True}
        sys.stdin.read()  # until it is killed, or told to go: to abort would cut what is still on its way
    for each in sides:
        each.transport.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
