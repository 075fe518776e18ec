"""The transport that a pair chooses as it is formed: NIXL where bytes come through by it, else the host's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from disagg.engine.fake_runner import fake_generate
from disagg.engine.kv_transfer.transport import PairTransport, TransportError
from disagg.engine.kv_transfer.transports import auto, nixl, nixl_agent
from disagg.engine.kv_transfer.transports.auto import Address, AutoConnector, AutoRendezvous
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.kv_transfer.transports.nixl import NixlTransport
from disagg.engine.kv_transfer.transports.nixl_agent import NixlAgent, NixlError
from disagg.proto.messages import RoleName
from tests.integration.transfer.test_hand_over import _config
from tests.support.secret import SECRET, checksum
from tests.support.transport_peer import HOST, Answers, content
from tests.support.transports import SETTINGS, needs_nixl
from tests.support.waiting import until
from tests.support.workers import open_gateway, prompt_of, running_workers


@pytest.fixture
def rendezvous() -> Iterator[AutoRendezvous]:
    """Afterwards no thread of a channel is left."""
    threads = set(threading.enumerate())
    rendezvous = AutoRendezvous(SETTINGS)
    yield rendezvous
    rendezvous.close()
    until(lambda: set(threading.enumerate()) <= threads, "a thread is left")


def both(rendezvous: AutoRendezvous) -> list[PairTransport]:
    """(P's end, D's end), in this process."""
    ends: list[PairTransport] = []
    thread = threading.Thread(target=lambda: ends.append(rendezvous.accept("pair-1")))
    thread.start()
    p = AutoConnector(SETTINGS)("pair-1", rendezvous.address)
    thread.join()
    return [p, *ends]


def assert_moves(p: PairTransport, d: PairTransport) -> None:
    answers, target, sent = Answers(), np.zeros(5000, np.uint8), content(1, 5000)
    d.recv(target, 5000, answers)
    p.send(sent, 5000, lambda *_: None)
    assert answers.next() == (True, "", checksum(sent))
    p.close()
    d.close()


@needs_nixl
def test_nixl_where_bytes_come_through(rendezvous: AutoRendezvous) -> None:
    p, d = both(rendezvous)
    assert [end.name for end in (p, d)] == ["nixl", "nixl"]
    assert_moves(p, d)


def test_shared_memory_where_it_is_not_installed(rendezvous: AutoRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MODULES", ("no_such_package",))
    nixl_agent.load.cache_clear()
    p, d = both(rendezvous)
    assert [end.name for end in (p, d)] == ["shm", "shm"]
    assert_moves(p, d)
    nixl_agent.load.cache_clear()


@needs_nixl
def test_shared_memory_where_one_side_has_no_nixl(rendezvous: AutoRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = iter(["", "transport nixl needs the extra `nixl`"])
    monkeypatch.setattr(auto, "_why_not", lambda: next(sides))
    p, d = both(rendezvous)
    assert [end.name for end in (p, d)] == ["shm", "shm"]
    assert_moves(p, d)


@needs_nixl
@pytest.mark.parametrize("fault", ["agent", "read"])
def test_shared_memory_where_no_bytes_come_through(
    fault: str, rendezvous: AutoRendezvous, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides do without it, whichever has failed, and nothing of the try is left."""

    def fail(*_: object) -> None:
        raise NixlError("no way")

    monkeypatch.setattr(NixlAgent, "read" if fault == "read" else "register", fail)
    with caplog.at_level("INFO"):
        p, d = both(rendezvous)
    assert [end.name for end in (p, d)] == ["shm", "shm"]
    assert caplog.text.count("without NIXL") == 2
    assert_moves(p, d)


@needs_nixl
def test_a_side_that_fails_alone_takes_the_other_along(
    rendezvous: AutoRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair stands on D, and P has given up meanwhile: D must not wait for it."""
    real = nixl.form

    def form(*arguments: Any) -> NixlTransport:
        transport: NixlTransport = real(*arguments)
        if "sender" in arguments:
            transport.close()
            raise TransportError("given up")
        return transport

    monkeypatch.setattr(nixl, "form", form)
    p, d = both(rendezvous)
    assert [end.name for end in (p, d)] == ["shm", "shm"]
    assert_moves(p, d)


def test_addresses() -> None:
    address = Address("10.0.0.1:7", "shm", "boot-1/disagg|kv")
    assert Address.parse(str(address)) == address
    for bad in ("", "10.0.0.1:7", "a|b"):
        with pytest.raises(TransportError, match="is no address of transport auto"):
            Address.parse(bad)
    with pytest.raises(TransportError, match="transport auto has no 'tcp'"):
        AutoConnector(SETTINGS)._other("tcp")


def test_the_door_to_it() -> None:
    rendezvous = make_rendezvous("auto", HOST, SECRET)
    assert isinstance(rendezvous, AutoRendezvous)
    assert isinstance(make_connector("auto", HOST, SECRET), AutoConnector)
    rendezvous.close()


@needs_nixl
async def test_workers_report_what_was_chosen() -> None:
    roles: tuple[RoleName, ...] = ("prefill", "decode")
    with running_workers(*(_config(role, "auto") for role in roles)) as infos:
        async with open_gateway(infos) as gateway:
            prompt = prompt_of(100)
            answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=9)
            assert answer.token_ids == fake_generate(prompt, 9)
            assert [moved.transport for moved in answer.handed_over] == ["nixl"]
