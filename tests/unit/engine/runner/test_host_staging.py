"""In which order streams fill, digest, copy and reuse the pieces of a device, on a CPU whose streams and events are
played: each call is written down with the stream that it is queued on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.engine.kv_transfer.transports.digest import digest
from disagg.engine.runner.model import device_inputs, host_staging, kv_cache
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import GatheredPart, HostStaging
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.kernels import dispatch
from disagg.proto.messages import ONE_RANK, KvLayout
from tests.support.secret import checksum as keyed

CPU = torch.device("cpu")
LAYOUT = KvLayout.dense(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", bytes_per_token=2 * 2 * 2 * 8 * 4)
TABLE = [3, 0, 2]


class PlayedStream:
    def __init__(self, device: PlayedDevice, name: str) -> None:
        self._device, self.name = device, name

    def wait_event(self, event: PlayedEvent) -> None:
        self._device.calls.append(f"{self.name}: wait for {event.number}")


class PlayedEvent:
    def __init__(self, device: PlayedDevice, *, blocking: bool) -> None:
        self._device, self.is_blocking = device, blocking
        self.number = device.num_events
        device.num_events += 1

    def record(self, stream: PlayedStream | None = None) -> None:
        self._device.calls.append(f"{(stream or self._device.current).name}: event {self.number}")

    def query(self) -> bool:
        return self._device.is_quick

    def synchronize(self) -> None:
        self._device.calls.append(f"host: wait for {self.number}")


class PlayedDevice:
    """In place of `torch.cuda`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_events = 0
        self.is_quick = False
        """Whether all that is queued is done when somebody asks."""
        self.current = PlayedStream(self, "engine")
        self.Event: Callable[..., PlayedEvent] = lambda blocking=False: PlayedEvent(self, blocking=blocking)

    def current_stream(self, _: object) -> PlayedStream:
        return self.current

    @contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def set_device(self, device: object) -> None:
        self.calls.append(f"host: on {device}")

    def note(self, what: str) -> None:
        self.calls.append(f"{self.current.name}: {what}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    played = PlayedDevice()
    pieces: dict[int, str] = {}
    gather, sums_of, copy = dispatch.gather_kv, DigestSums.of, Tensor.copy_

    def gather_kv(cache: Tensor, table: Any, start: int, end: int, out: Tensor) -> None:
        played.note(f"fill {pieces.setdefault(out.data_ptr(), chr(ord('A') + len(pieces)))}")
        gather(cache, table, start, end, out)

    def of(payloads: Any, checksum: Any) -> DigestSums:
        played.note("digest")
        return sums_of(payloads, checksum)

    def to_host(sums: DigestSums) -> DigestSums:
        played.note("copy digest")
        return sums

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            played.note("copy")
        return copy(target, source)

    for owner, name, value in (
        (device_inputs, "_cuda", played),
        (host_staging, "_cuda", played),
        (kv_cache, "gather_kv", gather_kv),
        (DigestSums, "of", of),
        (DigestSums, "to_host", to_host),
        (Tensor, "copy_", copy_),
    ):
        monkeypatch.setattr(owner, name, value)
    return played


def cache_on(device: PlayedDevice) -> KvCache:
    staging = HostStaging(CPU)
    staging._copies = PlayedStream(device, "copies")
    cache = KvCache(LAYOUT, 5, 16, CPU, host_staging=staging)
    cache.tensor_NL2KBD.normal_()
    return cache


def gathered(cache: KvCache, end: int = 20, *, digests: bool = True) -> tuple[GatheredPart, Tensor]:
    out = torch.zeros(end * LAYOUT.bytes_per_token, dtype=torch.uint8)
    return cache.start_gather(TABLE, 0, end, out, ONE_RANK, keyed, digests=digests), out


def test_a_piece_is_copied_behind_what_fills_it_and_filled_behind_what_copies_it(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for nothing; two pieces take turns."""
    monkeypatch.setattr(host_staging, "MAX_PIECES", 2)
    cache = cache_on(device)
    for _ in range(3):
        gathered(cache)
    assert device.calls == [
        *("engine: fill A", "engine: digest", "engine: event 0"),
        *("copies: wait for 0", "copies: copy", "copies: copy digest", "copies: event 1"),
        *("engine: fill B", "engine: digest", "engine: event 2"),
        *("copies: wait for 2", "copies: copy", "copies: copy digest", "copies: event 3"),
        "engine: wait for 1",
        *("engine: fill A", "engine: digest", "engine: event 4"),
        *("copies: wait for 4", "copies: copy", "copies: copy digest", "copies: event 5"),
    ]


def test_a_piece_that_was_copied_out_is_the_next_one_again(device: PlayedDevice) -> None:
    cache = cache_on(device)
    gathered(cache)
    gathered(cache)
    device.is_quick = True
    device.calls.clear()
    for _ in range(3):
        gathered(cache)
    assert [call for call in device.calls if "fill" in call or "engine: wait" in call] == [
        "engine: fill A",
        "engine: fill B",
        "engine: fill A",
    ]


def test_there_are_pieces_for_a_whole_step(device: PlayedDevice) -> None:
    """None of it waits for a copy; the next one does."""
    cache = cache_on(device)
    for _ in range(host_staging.MAX_PIECES):
        gathered(cache)
    assert not any(call.startswith("engine: wait") for call in device.calls)
    gathered(cache)
    assert [call for call in device.calls if call.startswith("engine: wait")] == ["engine: wait for 1"]


def test_a_device_without_room_for_another_piece_takes_turns_with_those_that_it_has(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_on(device)
    gathered(cache)
    gathered(cache)

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(host_staging, "Piece", no_room)
    device.calls.clear()
    gathered(cache)
    gathered(cache)
    assert [call for call in device.calls if call.startswith(("engine: fill", "engine: wait"))] == [
        *("engine: wait for 1", "engine: fill A"),
        *("engine: wait for 3", "engine: fill B"),
    ]


def test_a_device_without_room_for_any_piece_fails_the_gather(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(host_staging, "Piece", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        gathered(cache_on(device))


def test_a_larger_piece_is_made_when_the_smaller_one_was_read(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory goes back to those who would hand it out for the engine's stream."""
    monkeypatch.setattr(host_staging, "MAX_PIECES", 2)
    cache = cache_on(device)
    gathered(cache, 20)
    gathered(cache, 20)
    device.calls.clear()
    gathered(cache, 33)
    assert device.calls[:1] == ["host: wait for 1"]


def test_what_comes_of_it_is_the_devices_digest_or_the_hosts_checksum(device: PlayedDevice) -> None:
    cache = cache_on(device)
    part, out = gathered(cache)
    other, same = gathered(cache, digests=False)
    assert torch.equal(out, same)
    assert out.any()
    assert (part.checksum(), part.checksums()) == (digest(out, keyed), [digest(out, keyed)])
    assert other.checksum() == keyed(out) != part.checksum()
    assert device.calls[-4:] == ["engine: event 2", "copies: wait for 2", "copies: copy", "copies: event 3"]


def test_whoever_waits_sleeps_and_is_on_the_device(device: PlayedDevice) -> None:
    mark = Mark(pinned=True, blocking=True)
    mark.set()
    part = GatheredPart([], None, mark, keyed, torch.device("cuda", 1))
    device.calls.clear()
    assert not part.is_done()
    part.wait()
    assert device.calls == ["host: on cuda:1", "host: wait for 0"]
    assert mark._event.is_blocking


def test_a_gather_that_cannot_be_queued_leaves_the_pieces_to_the_next(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_on(device)
    fails = {"now": True}
    gather = dispatch.gather_kv

    def broken(*arguments: Any) -> None:
        if fails.pop("now", False):
            raise RuntimeError("no launch")
        gather(*arguments)

    monkeypatch.setattr(kv_cache, "gather_kv", broken)
    with pytest.raises(RuntimeError, match="no launch"):
        gathered(cache)
    assert device.calls == []
    part, out = gathered(cache)
    assert part.checksum() == digest(out, keyed)


def test_what_arrives_is_digested_behind_its_copy_and_before_it_is_in_the_cache(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter = dispatch.scatter_kv

    def scatter_kv(*arguments: Any) -> None:
        device.note("scatter")
        scatter(*arguments)

    monkeypatch.setattr(kv_cache, "scatter_kv", scatter_kv)
    cache, other = cache_on(device), cache_on(device)
    _, out = gathered(cache)
    device.calls.clear()
    sums = other.scatter_part([1, 4], 0, 20, out, ONE_RANK, keyed)
    assert device.calls == ["engine: copy", "engine: digest", "engine: scatter"]
    assert sums is not None
    assert sums.digests(keyed) == [digest(out, keyed)]
    assert other.scatter_part([1, 4], 0, 20, out, ONE_RANK) is None
