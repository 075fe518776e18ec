"""What `disagg replay` says of a recording, and of one request in it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli.replay.command import run_replay
from disagg.proto.errors import ConfigError
from disagg.router.config import RouterConfig
from disagg.router.recording.recorded_core import RecordedCore
from tests.support.recordings import GATEWAY_ID, ListSink, file_of, header_of
from tests.support.router import Scenario, end_update, prefilled_update, routed_request, tokens_update

CONFIG = RouterConfig(local_prefill="never")


def entries() -> list[bytes]:
    """One request whose first decode worker is lost; another one that is cancelled while it waits."""
    sink, it = ListSink(), Scenario(config=CONFIG)
    it.core = RecordedCore(CONFIG, GATEWAY_ID, sink)
    it.up("p0")
    it.up("d0")
    it.now = 0.010
    it.submit(routed_request("r0", 40, max_tokens=6), arrival=0.005)
    it.now = 0.030
    it.hand_over("r0", "p0", "d0", 5)
    for index in range(1, 4):
        it.now += 0.01
        it.update("d0", tokens_update("r0", 0, index, 6))
    it.up("d1")
    it.lost("d0")
    it.now = 0.080
    it.update("p0", tokens_update("r0", 1, 4, 7), prefilled_update("r0", 1, cached_tokens=32))
    it.now = 0.100
    it.update("d1", tokens_update("r0", 1, 5, 8), end_update("r0", 1, "length"))
    it.submit("r1")
    it.now = 0.110
    it.cancel("r1")
    return sink.entries


def replayed(data: bytes, tmp_path: Path, request_id: str | None = None) -> tuple[int, str]:
    file, out = tmp_path / "a.events", io.StringIO()
    file.write_bytes(data)
    status = run_replay(file, request_id, Console(file=out, width=120), as_json=False)
    text = out.getvalue().replace(str(tmp_path), "")
    return status, "\n".join(line.rstrip() for line in text.splitlines())


def test_the_summary(tmp_path: Path) -> None:
    assert replayed(file_of(header_of(CONFIG), entries()), tmp_path) == (
        0,
        "\n".join(
            [
                "recording  /a.events",
                "began      1970-01-01 00:16:40 UTC, by g0, disagg 0, Python 3",
                "span       0.1 s; the gateway stopped",
                "events     14: 7 FromWorker, 3 WorkerUp, 2 Submit, 1 WorkerLost, 1 CancelRequest",
                "requests   2: 1 length, 1 cancelled",
                "replay     identical: 16 commands",
            ]
        ),
    )


def test_the_story_of_a_request(tmp_path: Path) -> None:
    status, text = replayed(file_of(header_of(CONFIG), entries()), tmp_path, "r0")
    assert status == 0
    story, _, rest = text.partition("\n\nrequest ")
    assert story.splitlines() == [
        "r0 came at 1970-01-01 00:16:40.005000 UTC",
        "",
        "     +5.0 ms  submitted: 40 tokens of the prompt, at most 6 of the answer",
        "              -> dispatch attempt 0 to p0, to decode on d0",
        "                 prefill  decode  cost  prefill  transfer  decode  barrier  TTFT  TPOT",
        "              >  p0       d0      51.8     21.1       1.0    27.7      2.0  21.1   5.5",
        "              policy joint; milliseconds, as predicted at the placement; > was chosen",
        "    +25.0 ms  p0: 1 token from index 0; prompt computed, 0 of it cached",
        "              -> emit 1 token",
        "    +25.0 ms  d0: 1 token from index 0; has the KV, 4 KiB by fake",
        "    +35.0 ms  d0: 3 tokens in 3 steps, until +55.0 ms",
        "    +55.0 ms  the session to d0 broke",
        "              -> dispatch attempt 1 to p0, to decode on d1",
        "                 prefill  decode  cost  prefill  transfer  decode  barrier  TTFT  TPOT",
        "              >  p0       d1      16.7      9.8       0.0     5.5      1.3   9.8   5.5",
        "              policy joint; milliseconds, as predicted at the placement of the latest attempt; > was chosen",
        "    +75.0 ms  p0: 1 token from index 4; prompt computed, 32 of it cached",
        "              -> emit 1 token",
        "    +95.0 ms  d1: 1 token from index 5; ended attempt 1: length",
        "              -> emit 1 token",
        "              -> cancel attempt 1 on p0",
        "              -> finish: length after 6 tokens",
    ]
    lines = rest.splitlines()
    assert [line for line in lines if line.startswith(("outcome", "attempts", "Why there", "Where", "replay"))] == [
        "outcome      length",
        "attempts     2",
        "Where the time went",
        "replay     identical: 16 commands",
    ]


def test_the_beginning_of_several_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^request: 2 ids begin with r: r0, r1; type more of it$"):
        replayed(file_of(header_of(CONFIG), entries()), tmp_path, "r")


def test_as_json(tmp_path: Path) -> None:
    file, out = tmp_path / "a.events", io.StringIO()
    file.write_bytes(file_of(header_of(CONFIG), entries(), is_ended=False))
    assert run_replay(file, "r0", Console(file=out, width=120), as_json=True) == 0
    found = json.loads(out.getvalue())
    assert (found["identical"], found["ended"], found["began_at"]) == (True, None, 1000.0)
    moments = found["request"]["moments"]
    assert [(moment["event"], round(moment["at_ms"]), len(moment["decisions"])) for moment in moments] == [
        ("Submit", 5, 1),
        ("FromWorker", 25, 1),
        ("FromWorker", 25, 0),
        ("FromWorker", 35, 0),
        ("WorkerLost", 55, 1),
        ("FromWorker", 75, 1),
        ("FromWorker", 95, 3),
    ]
    assert (moments[3]["text"], round(moments[3]["until_ms"])) == ("d0: 3 tokens in 3 steps, until +55.0 ms", 55)
    placements = [moment["placement"] for moment in moments if "placement" in moment]
    assert [(each["prefill_worker"], each["decode_worker"], each["attempts"]) for each in placements] == [
        ("p0", "d0", 1),
        ("p0", "d1", 2),
    ]
    assert found["request"]["explanation"]["outcome"] == "length"


def test_a_difference_is_shown_and_ends_the_replay(tmp_path: Path) -> None:
    recorded = entries()
    data = file_of(header_of(CONFIG), [*recorded[:2], *recorded[3:]])
    status, text = replayed(data, tmp_path)
    assert status == 1
    where = "event 3, 0.030 s after the beginning: p0: 1 token from index 0; prompt computed, 0 of it cached"
    assert text.splitlines()[-3:] == [
        f"replay     differs at {where}",
        "           commands recorded: 1; the replay has 0, not the same:",
        "           -> nothing",
    ]


def test_a_file_that_is_cut_off_or_damaged(tmp_path: Path) -> None:
    data = file_of(header_of(CONFIG), entries(), in_frame=5)
    status, text = replayed(data[:-60], tmp_path)
    assert status == 0
    assert "cut off: the gateway was killed, or still records" in text
    damaged = bytearray(data)
    damaged[-100] ^= 1
    status, text = replayed(bytes(damaged), tmp_path)
    assert status == 2
    assert text.splitlines()[-2].startswith("replay     identical: ")
    assert text.splitlines()[-1].startswith("damage     damaged at byte ")


@pytest.mark.parametrize(
    ("data", "request_id", "message"),
    [
        (b"x" * 100, None, "not a recording of a router's events"),
        (None, None, "No such file or directory"),
        (file_of(header_of(CONFIG), []), "r9", "there is no request r9 in it"),
    ],
)
def test_what_is_of_no_use_is_named(tmp_path: Path, data: bytes | None, request_id: str | None, message: str) -> None:
    file = tmp_path / "a.events"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        run_replay(file, request_id, Console(file=io.StringIO()), as_json=False)
    assert str(caught.value) == f"{file}: {message}"
