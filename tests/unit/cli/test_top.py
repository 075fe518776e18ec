"""What `disagg top` shows of a state, and that it outlives its gateway."""

from __future__ import annotations

import io
import itertools
import os
import pty
import termios
import threading
import time
from collections.abc import Iterator
from typing import TextIO, cast

import pytest
from rich.console import Console, RenderableType

from disagg.cli import top
from disagg.cli.top import quits_on_q
from disagg.client import Client, ClusterState
from disagg.cluster.system.children import LaunchError
from disagg.proto.errors import PermissionDeniedError, RequestCancelledError, UnavailableError
from disagg.v1 import inference_pb2 as pb


def text_of(drawn: RenderableType, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def worker(name: str, **numbers: int) -> pb.WorkerState:
    blocks = {f"kv_blocks_{kind}": number for kind, number in numbers.items()}
    return pb.WorkerState(worker_id=name, phase="ready", sequences=3, **blocks)  # type: ignore[arg-type]


def full_state() -> ClusterState:
    return pb.GetClusterStateResponse(
        workers=[
            worker("prefill-0", total=100, active=25, cached=50),
            worker("decode-0", total=100, active=50, reserved=25, cached=25),
        ],
        pools=[
            pb.PoolState(name="prefill", desired=1, ready=1),
            pb.PoolState(name="decode", desired=2, ready=1),
        ],
        stages=[
            pb.StageCount(stage=stage, requests=n)
            for stage, n in (("decode", 7), ("queued", 1), ("prefill", 2), ("transfer", 0))
        ],
        slos=[pb.SloState(slo="ttft", met=99, total=100), pb.SloState(slo="tpot", met=0, total=0)],
        transfers=[
            pb.TransferState(
                prefill_worker="prefill-0", decode_worker="decode-0", transport="gloo", transfers=4, bytes=3 << 20
            )
        ],
        requests_per_s=2.25,
        output_tokens_per_s=140.4,
    )


def test_the_whole_picture() -> None:
    assert text_of(top.picture(full_state(), "127.0.0.1:8470", ascii_only=True)) == (
        "disagg 127.0.0.1:8470   prefill 1 of 1   decode 1 of 2\n"
        "\n"
        "worker     phase  seqs  KV blocks                 in use  cached   of\n"
        "prefill-0  ready     3  ######------------......      25      50  100\n"
        "decode-0   ready     3  ############++++++------      75      25  100\n"
        "KV: # in use  + promised  - cached, can be had  . free\n"
        "\n"
        "requests queued 1  prefill 2  transfer 0  decode 7   2.2/s, 140 tokens/s\n"
        "targets  ttft 99.0 % (99 of 100)\n"
        "\n"
        "from       to        transport  hand-overs       KV  MB/s  failed\n"
        "prefill-0  decode-0  gloo                4  3.0 MiB             0"
    )


def test_workers_with_drafts_show_tokens_a_step_and_how_many_drafts_were_accepted() -> None:
    state = full_state()
    decode = state.workers[1]
    decode.tokens_per_step, decode.drafted_tokens, decode.accepted_tokens = 1.754, 40, 29
    lines = text_of(top.picture(state, "127.0.0.1:8470", ascii_only=True)).splitlines()[2:5]
    assert [line.split()[-3:] for line in lines] == [
        ["of", "tokens/step", "accepted"],
        ["25", "50", "100"],
        ["1.75", "72", "%"],
    ]


def test_workers_that_load_or_fetch_kv_show_its_share_of_the_prompts() -> None:
    state = full_state()
    prefill = state.workers[0]
    prefill.prompt_tokens, prefill.fetched_tokens = 1000, 254
    lines = text_of(top.picture(state, "127.0.0.1:8470", ascii_only=True)).splitlines()[2:5]
    assert [line.split()[-3:] for line in lines] == [
        ["cached", "of", "fetched"],
        ["100", "25", "%"],
        ["75", "25", "100"],
    ]
    prefill.loaded_tokens = 126
    lines = text_of(top.picture(state, "127.0.0.1:8470", ascii_only=True)).splitlines()[2:4]
    assert [line.split()[-4:] for line in lines] == [["cached", "of", "loaded", "fetched"], ["13", "%", "25", "%"]]


def test_workers_of_several_ranks_show_these() -> None:
    state = full_state()
    prefill, decode = state.workers
    prefill.tp, prefill.pp, decode.tp, decode.pp = 1, 4, 1, 1
    assert text_of(top.picture(state, "x:1", ascii_only=True)).splitlines()[2:5] == [
        "worker     phase  ranks  seqs  KV blocks                 in use  cached   of",
        "prefill-0  ready  pp 4      3  ######------------......      25      50  100",
        "decode-0   ready            3  ############++++++------      75      25  100",
    ]


def test_load_that_is_left_out_is_not_shown_as_none() -> None:
    state = pb.GetClusterStateResponse(
        workers=[pb.WorkerState(worker_id="decode-0", phase="ready", kv_blocks_total=100)],
        pools=[pb.PoolState(name="decode", desired=1, ready=1)],
        load_left_out=True,
    )
    lines = text_of(top.picture(state, "127.0.0.1:8470", ascii_only=True)).splitlines()
    assert ["decode-0", "ready", "100"] in [line.split() for line in lines]
    assert lines[-1] == "load is shown to keys with the scope metrics or admin"


def test_rates_are_made_of_two_states() -> None:
    now, then = full_state(), full_state()
    then.transfers[0].bytes = 1 << 20
    assert "  3.0 MiB   1.0       0" in text_of(top.picture(now, "x:1", top.Earlier(then, (2 << 20) / 1e6)))
    then.transfers[0].bytes = 9 << 20  # the worker began anew since
    assert "  3.0 MiB   0.0       0" in text_of(top.picture(now, "x:1", top.Earlier(then, 1.0)))
    del then.transfers[:]
    assert "  3.0 MiB             0" in text_of(top.picture(now, "x:1", top.Earlier(then, 1.0)))


@pytest.mark.parametrize(
    ("numbers", "bar"),
    [
        ({"total": 0}, ""),
        ({"total": 8}, "........"),
        ({"total": 8, "active": 8}, "########"),
        ({"total": 8, "active": 1, "reserved": 1, "cached": 1}, "#+-....."),
        ({"total": 1000, "active": 1}, "#......."),
        ({"total": 1000, "active": 999, "cached": 1}, "########"),
        ({"total": 8, "active": 8, "reserved": 8}, "########"),
    ],
)
def test_bars(numbers: dict[str, int], bar: str) -> None:
    assert top.kv_bar(worker("w", **numbers), cells=8, ascii_only=True).plain == bar
    drawn = top.kv_bar(worker("w", **numbers), cells=8).plain
    assert drawn == bar.translate(str.maketrans("#+-.", "█▒░·"))


def test_a_gateway_that_knows_less_is_shown_as_well() -> None:
    state = pb.GetClusterStateResponse(
        workers=[pb.WorkerState(worker_id="prefill-0")], queued_requests=1, running_requests=2
    )
    text = text_of(top.picture(state, "x:1"))
    assert text.startswith("disagg x:1   the controller does not answer; this is what the gateway sees\n")
    assert "\nprefill-0  unknown     0" in text
    assert "requests queued 1  running 2   0.0/s, 0 tokens/s" in text
    assert "targets  no request that had some ended in the last minute" in text


def test_what_is_not_well_is_said_below() -> None:
    state = pb.GetClusterStateResponse(
        workers=[
            pb.WorkerState(worker_id="decode-0", phase="failed", detail="no [weights]"),
            pb.WorkerState(worker_id="decode-1", phase="ready", detail="an old story"),
        ]
    )
    text = text_of(top.picture(state, "x:1"))
    assert text.endswith("\ndecode-0: no [weights]")
    assert "old story" not in text


def test_many_pairs_are_cut() -> None:
    state = pb.GetClusterStateResponse(
        transfers=[
            pb.TransferState(prefill_worker=f"prefill-{i}", decode_worker="decode-0", bytes=i) for i in range(20)
        ]
    )
    text = text_of(top.picture(state, "x:1"))
    assert text.endswith("\nand 8 pairs more")
    assert "prefill-19 " in text
    assert "prefill-8 " in text
    assert "prefill-7 " not in text


class Watched:
    """A client whose gateway goes away and comes back."""

    def __init__(self, *streams: list[ClusterState] | Exception) -> None:
        self._streams = iter(streams)

    def watch(self, interval_s: float) -> Iterator[ClusterState]:
        stream = next(self._streams)
        if isinstance(stream, Exception):
            raise stream
        yield from stream
        raise RequestCancelledError("the server stops")


def test_a_gateway_that_goes_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    state = full_state()
    client = Watched([state, state], UnavailableError("refused", "unreachable"), [state], PermissionDeniedError("no"))
    drawn = top.pictures(cast(Client, client), "x:1", 1.0, ascii_only=True)
    shown = [text_of(picture) for picture in itertools.islice(drawn, 6)]
    with pytest.raises(PermissionDeniedError):
        next(drawn)
    lost = "no gateway answers at x:1; waiting for it (q ends this)"
    assert [text.startswith(lost) for text in shown] == [False, False, True, True, False, True]
    assert pauses == [top.RETRY_S] * 3
    # A rate needs two states of one stream.
    assert ["3.0 MiB   0.0 " in text for text in shown] == [False, True, False, False, False, False]


class Once:
    """A client that is asked once."""

    def __init__(self, answer: ClusterState | Exception) -> None:
        self._answer = answer

    def __enter__(self) -> Once:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def cluster_state(self) -> ClusterState:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_one_picture_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "open_client", lambda address: Once(full_state()))
    out = io.StringIO()
    assert top.run_top("x:1", Console(file=out, width=100), once=False, interval_s=1.0) == 0
    assert out.getvalue().startswith("disagg x:1   prefill 1 of 1   decode 1 of 2")


def test_without_a_gateway_it_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "open_client", lambda address: Once(UnavailableError("refused", "unreachable")))
    with pytest.raises(LaunchError, match=r"^no gateway answers at x:1; start one with: disagg up$"):
        top.run_top("x:1", Console(file=io.StringIO()), once=True, interval_s=1.0)


def test_ctrl_c_ends_it_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[RenderableType]:
        yield "a picture"
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "open_client", lambda address: Once(full_state()))
    monkeypatch.setattr(top, "pictures", interrupted)
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, legacy_windows=False)
    assert top.run_top("x:1", console, once=False, interval_s=1.0) == 0
    assert "a picture" in out.getvalue()


WAIT_S = 30.0
"""How long anything may take before a test fails."""


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """The end of the keys, and the end of the program."""
    keys, screen = pty.openpty()
    with os.fdopen(screen) as program:
        yield keys, program
    os.close(keys)


@pytest.mark.parametrize("pressed", [b"q", b"Q", b"abq"])
def test_q_is_ctrl_c(terminal: tuple[int, TextIO], pressed: bytes) -> None:
    keys, program = terminal
    before = termios.tcgetattr(program.fileno())
    is_quit = False
    try:
        with quits_on_q(program):
            assert not termios.tcgetattr(program.fileno())[3] & termios.ICANON
            os.write(keys, pressed)
            threading.Event().wait(WAIT_S)
    except KeyboardInterrupt:
        is_quit = True
    assert is_quit
    assert termios.tcgetattr(program.fileno()) == before


def test_other_keys_do_nothing_and_no_thread_is_left(terminal: tuple[int, TextIO]) -> None:
    keys, program = terminal
    threads = threading.active_count()
    with quits_on_q(program):
        os.write(keys, b"xyz")
    assert threading.active_count() == threads


def test_without_a_terminal_there_are_no_keys() -> None:
    threads = threading.active_count()
    with quits_on_q(io.StringIO("q")):
        assert threading.active_count() == threads
