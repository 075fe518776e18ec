"""KV of a device's cache that goes through host memory over the transports of the host, on a CPU that plays the device:
what pins memory and waits for a stream is left out, all else is what a GPU worker does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disagg.decode_worker.role import DecodeRole
from disagg.engine.config import TransferLimits, TransportName, WorkerConfig
from disagg.engine.failpoints import parse
from disagg.engine.faults.faulty import Failpoints
from disagg.engine.kv_transfer.transport import PairTransport
from disagg.engine.kv_transfer.transports.digest import digest
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.kv_transfer.transports.shm import ShmTransport
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import HostStaging, Piece
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.engine.runner.model_runner import TorchModelRunner, warm_up
from disagg.engine.sharding.shards import Shard
from disagg.engine.shell.worker import Worker
from disagg.prefill_worker.role import PrefillRole
from disagg.proto.messages import KvLayout, ParallelShape, RoleName, WorkerInfo
from tests.support.secret import SECRET
from tests.support.secret import checksum as keyed
from tests.support.stepping import assert_logits_close, decode, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint, reference_generate
from tests.support.transport_peer import HOST, Answers
from tests.support.transports import NIXL
from tests.support.workers import open_gateway

CPU = torch.device("cpu")
PROMPT = [(11 * i * i + 2 * i + 1) % VOCAB_SIZE for i in range(75)]
CHUNK_ENDS = [16, 41, 75]
TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
LAYOUT = KvLayout.dense(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float32", bytes_per_token=3 * 2 * 4 * 8 * 4)
TABLE = [4, 0, 2]


class Played(HostStaging):
    """Notes which way bytes went."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.went: list[tuple[str, int]] = []

    def to_host(self, piece: Piece, buffer: torch.Tensor, sums: DigestSums | None) -> tuple[Mark, DigestSums | None]:
        self.went.append(("out", buffer.numel()))
        return super().to_host(piece, buffer, sums)

    def to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        self.went.append(("in", buffer.numel()))
        return super().to_device(buffer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runner's cache is on a device that staging buffers are not on."""
    monkeypatch.setattr(HostStaging, "of", classmethod(lambda *_: Played()))


def staging_of(runner: TorchModelRunner) -> Played:
    assert isinstance(runner._host_staging, Played)
    return runner._host_staging


def ends_of(transport: TransportName) -> tuple[PairTransport, PairTransport]:
    """(P's end, D's end), in this process."""
    rendezvous = make_rendezvous(transport, HOST, SECRET)
    ends: list[PairTransport] = []
    thread = threading.Thread(target=lambda: ends.append(rendezvous.accept("pair-1")))
    thread.start()
    p = make_connector(transport, HOST, SECRET)("pair-1", rendezvous.address)
    thread.join()
    rendezvous.close()
    return p, ends[0]


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("transport", ["gloo", "shm", NIXL, "auto"])
def test_a_sequence_goes_on_exactly_behind_host_staging(folder: Path, transport: TransportName) -> None:
    expected_ids, expected_logits = reference_generate(folder, PROMPT, 8)
    prefilled, decoding = make_runner(folder), make_runner(folder, block_size=32)
    prefilled.checksum = decoding.checksum = keyed
    sender = make_sequence(PROMPT, [9, 2, 31, 0, 17])
    token_id = int(prefill(prefilled, sender).argmax())
    receiver = make_sequence([*PROMPT, token_id], [5, 4, 3])
    token_bytes = prefilled.layout.bytes_per_token
    source, target = prefilled.new_staging(40 * token_bytes), decoding.new_staging(40 * token_bytes)
    p, d = ends_of(transport)
    start = 0
    for end in CHUNK_ENDS:
        nbytes, received, sent = (end - start) * token_bytes, Answers(), Answers()
        announced = prefilled.gather(sender.block_table, start, end, source[:nbytes])
        d.recv(target, nbytes, received)
        p.send(source, nbytes, sent)
        assert (received.next(), sent.next()) == ((True, "", announced), (True, "", 0))
        source[:] = 0xEE
        decoding.scatter(receiver.block_table, start, end, target[:nbytes])
        target[:] = 0xEE
        start = end
    p.close()
    d.close()
    logits = decode(decoding, [receiver], 7)[0]
    assert receiver.token_ids[len(PROMPT) :] == expected_ids
    assert_logits_close(logits, expected_logits[1:])
    sizes = [size * token_bytes for size in (16, 25, 34)]
    assert staging_of(prefilled).went == [("out", size) for size in sizes]
    assert staging_of(decoding).went == [("in", size) for size in sizes]


@pytest.mark.usefixtures("played")
def test_all_that_uses_staging_buffers_goes_through_it(folder: Path) -> None:
    """Bytes as without it, also where a buffer is larger, or too small; and the warm-up of copies."""
    runner, other = make_runner(folder), make_runner(folder)
    other._cache._host_staging = None
    sequence = make_sequence(PROMPT, [9, 2, 31, 0, 17])
    prefill(runner, sequence)
    nbytes = 30 * runner.layout.bytes_per_token
    buffer, plain = runner.new_staging(nbytes + 100), np.zeros(nbytes, np.uint8)
    buffer[:] = 77
    through = runner.gather(sequence.block_table, 20, 50, buffer)
    other.scatter([1, 2, 3, 4], 20, 50, buffer)
    assert other.gather([1, 2, 3, 4], 20, 50, plain) == through
    assert buffer[:nbytes].tolist() == plain.tolist()
    assert buffer[nbytes:].tolist() == [77] * 100
    for move in (runner.gather, runner.scatter):
        with pytest.raises(ValueError, match=rf"tokens \[20, 50\) take {nbytes} bytes; the buffer has {nbytes - 1}"):
            move(sequence.block_table, 20, 50, buffer[: nbytes - 1])
    warm_up(runner)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("transport", ["gloo", "shm", NIXL])
def test_both_devices_digest_what_goes_through_the_host(folder: Path, transport: TransportName) -> None:
    """Then the transport computes nothing, and a bit that flips on the way is found behind the copy to the device."""
    prefilled, decoding = make_runner(folder), make_runner(folder, block_size=32)
    prefilled.checksum = decoding.checksum = keyed
    assert prefilled.digests
    sender = make_sequence(PROMPT, [9, 2, 31, 0, 17])
    prefill(prefilled, sender)
    nbytes = len(PROMPT) * prefilled.layout.bytes_per_token
    source, target = prefilled.new_staging(nbytes), decoding.new_staging(nbytes)
    copying = prefilled.start_gather(sender.block_table, 0, len(PROMPT), source, digests=True)
    assert not isinstance(copying, int)
    copying.wait()
    assert copying.checksum() == digest(torch.from_numpy(source), keyed) != keyed(source)
    p, d = ends_of(transport)
    d.skip_checksums()
    received, sent = Answers(), Answers()
    d.recv(target, nbytes, received)
    p.send(source, nbytes, sent)
    assert (received.next(), sent.next()) == ((True, "", 0), (True, "", 0))
    p.close()
    d.close()
    arrived = decoding.start_scatter([5, 4, 3], 0, len(PROMPT), target, digests=True)
    assert arrived is not None
    assert arrived.checksum() == copying.checksum()
    target[nbytes // 2] ^= 1
    torn = decoding.start_scatter([5, 4, 3], 0, len(PROMPT), target, digests=True)
    assert torn is not None
    assert torn.checksum() != copying.checksum()


@pytest.mark.parametrize("peer", [ParallelShape(tp=tp) for tp in (1, 2, 4)])
def test_slices_of_ranks_are_the_same_behind_host_staging(peer: ParallelShape) -> None:
    shard = Shard(1, 2)
    staged = KvCache(LAYOUT, 5, 16, CPU, shard, Played())
    plain = KvCache(LAYOUT, 5, 16, CPU, shard)
    values = torch.randn(plain.tensor_NL2KBD.shape, generator=torch.Generator().manual_seed(1))
    for cache in (staged, plain):
        cache.tensor_NL2KBD.copy_(values)
    out, expected = (torch.zeros(33 * LAYOUT.bytes_per_token, dtype=torch.uint8) for _ in range(2))
    assert staged.gather_part(TABLE, 7, 40, out, peer, keyed) == plain.gather_part(TABLE, 7, 40, expected, peer, keyed)
    assert torch.equal(out, expected)
    assert out.any()
    back, wanted = KvCache(LAYOUT, 5, 16, CPU, shard, Played()), KvCache(LAYOUT, 5, 16, CPU, shard)
    for cache in (back, wanted):
        cache.scatter_part([3, 1, 0], 7, 40, out, peer)
    assert torch.equal(back.tensor_NL2KBD, wanted.tensor_NL2KBD)
    assert back.tensor_NL2KBD.any()


@pytest.mark.parametrize(
    ("device", "transport", "is_staged"),
    [
        ("cpu", "gloo", False),
        ("cpu", "nixl", False),
        ("cuda", "gloo", True),
        ("cuda", "shm", True),
        ("cuda", "auto", True),
        ("cuda", "local", True),
        ("cuda", "nixl", False),
        ("cuda", "nccl", False),
    ],
)
def test_which_workers_stage_in_the_hosts_memory(
    device: str, transport: TransportName, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((torch, "empty"), (torch.cuda, "Stream")):  # no such device is here
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    assert (HostStaging.of(torch.device(device), transport) is not None) is is_staged


def test_buffers_of_a_gpu_worker_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = HostStaging(CPU)
    assert staging.new_buffer(7).shape == (7,)
    staging._device = torch.device("cuda")
    asked: list[bool] = []
    real = torch.empty

    def empty(*size: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        asked.append(pin_memory)
        return real(*size, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", empty)
    buffer = staging.new_buffer(7)
    assert (type(buffer), buffer.dtype, buffer.shape, asked) == (np.ndarray, np.uint8, (7,), [True])


# ---------------------------------------------------------------- workers


@contextmanager
def workers(folder: Path, failpoints: str = "") -> Iterator[list[WorkerInfo]]:
    """A prefill and a decode worker in this process, so that their devices can be played."""
    roles: tuple[tuple[RoleName, Any], ...] = (("prefill", PrefillRole), ("decode", DecodeRole))
    made = [
        Worker(
            WorkerConfig(
                worker_id=f"{name}-0",
                roles=(name,),
                model_path=str(folder),
                dtype="float32",
                transport="shm",
                num_blocks=64,
                block_size=16,
                token_budget=32,
                transfer=TransferLimits(chunk_bytes=16 * TOKEN_BYTES, staging_bytes=64 * TOKEN_BYTES),
            ),
            [role],
            SECRET,
            parts=Failpoints.of_plan(parse(failpoints), f"{name}-0").parts(),
        )
        for name, role in roles
    ]
    try:
        yield [worker.start() for worker in made]
        assert not any(worker.crashed.is_set() for worker in made)
    finally:
        for worker in made:
            worker.stop()


@pytest.mark.usefixtures("played")
async def test_workers_hand_over_by_digests_and_keep_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the workers of GPUs do: copies are begun, waited for by a thread of their own, and compared on D's device."""
    expected_ids, _ = reference_generate(folder, PROMPT, 8)
    skipping: list[ShmTransport] = []
    monkeypatch.setattr(ShmTransport, "skip_checksums", lambda transport: skipping.append(transport))
    with workers(folder) as infos:
        async with open_gateway(infos) as gateway:
            answers = await asyncio.gather(
                *(gateway.run(PROMPT, worker="prefill-0", to="decode-0", max_tokens=8) for _ in range(3))
            )
    assert [answer.token_ids for answer in answers] == [expected_ids] * 3
    assert [len(answer.handed_over) for answer in answers] == [1] * 3
    assert len(skipping) == 1


@pytest.mark.usefixtures("played")
async def test_a_bit_that_flips_on_the_way_fails_one_hand_over_and_leaves_nothing(folder: Path) -> None:
    expected_ids, _ = reference_generate(folder, PROMPT, 8)
    with workers(folder, "transport.send=corrupt(after=2,times=1)") as infos:
        async with open_gateway(infos) as gateway:
            torn = await gateway.run(PROMPT, worker="prefill-0", to="decode-0", max_tokens=8)
            whole = await gateway.run([7, *PROMPT[1:]], worker="prefill-0", to="decode-0", max_tokens=8)
            again = await gateway.run(PROMPT, worker="prefill-0", to="decode-0", max_tokens=8)
    assert (torn.reason, torn.handed_over) == ("failed", [])
    assert torn.ends[0].detail == "the decode worker rejected chunk 2"
    assert whole.reason == "length"
    assert again.token_ids == expected_ids


@pytest.mark.usefixtures("played")
async def test_requests_that_are_cancelled_in_mid_copy_leave_nothing(folder: Path) -> None:
    with workers(folder) as infos:
        async with open_gateway(infos) as gateway:
            for _ in range(5):
                key, _ = gateway.submit(PROMPT, worker="prefill-0", to="decode-0", max_tokens=8)
                await asyncio.sleep(0)
                gateway.cancel(key)
            await gateway.wait_until_idle()
