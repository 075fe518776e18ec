"""The demonstration against a stand-in for the client: what it asks, what it shows, and when it says that it failed."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from rich.console import Console

from disagg.cli import demo
from disagg.cli.demo import Outcome
from disagg.client import Client, Delta, Finished, Usage
from disagg.cluster.system.terminal import format_bytes
from disagg.proto.errors import ConfigError, InternalError
from disagg.v1 import inference_pb2 as pb

GOOD = Outcome(
    name="1",
    text="Paris.",
    prompt_tokens=100,
    output_tokens=3,
    ttft_s=0.25,
    tpot_s=0.02,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    prefill_cached_tokens=64,
    decode_cached_tokens=80,
    kv_bytes=3 << 20,
    transport="gloo",
)


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200, force_terminal=False), text


class FakeClient:
    """Answers every question with the same words; the second turn finds its prefix cached."""

    def __init__(self, words: Sequence[str] = ("Par", "is", "."), finishes: bool = True) -> None:
        self.words = words
        self.finishes = finishes
        self.prompts: list[list[dict[str, str]]] = []
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def models(self) -> list[pb.Model]:
        return [pb.Model(name="tiny")]

    def stream(self, prompt: list[dict[str, str]], **options: Any) -> Iterator[Delta]:
        assert options == {"model": "tiny", "max_tokens": demo.MAX_TOKENS, "temperature": 0.0}
        with self._lock:
            self.prompts.append(prompt)
            request_id = f"r{next(self._ids)}-{len(prompt)}"
        for index, word in enumerate(self.words):
            yield Delta(word, (index,))
        if self.finishes:
            yield Delta("", (), Finished("stop", Usage(100, 64, len(self.words)), request_id))

    def explain(self, request_id: str) -> pb.ExplainRequestResponse:
        return pb.ExplainRequestResponse(
            request_id=request_id,
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            transport="gloo",
            kv_bytes=1 << 20,
            prefill_cached_tokens=64 if request_id.endswith("-4") else 0,
        )


def run_scenes(fake: FakeClient) -> tuple[list[Outcome], str]:
    screen, text = console()
    return demo.run_scenes(cast(Client, fake), screen), text.getvalue()


def test_scenes_ask_one_then_several_then_a_second_turn() -> None:
    fake = FakeClient()
    outcomes, text = run_scenes(fake)
    names = ["1", "2a", "2b", "2c", "3"]
    assert [outcome.name for outcome in outcomes] == names
    assert {outcome.text for outcome in outcomes} == {"Paris."}
    assert {outcome.output_tokens for outcome in outcomes} == {3}
    first, *several, second = fake.prompts
    assert sorted(turns[-1]["content"] for turns in several) == sorted(demo.PARALLEL_QUESTIONS)
    assert second[: len(first)] == first
    assert [(turn["role"], turn["content"]) for turn in second[len(first) :]] == [
        ("assistant", "Paris."),
        ("user", demo.SECOND_QUESTION),
    ]
    assert demo.problems(outcomes) == []
    assert text.count("Paris.") == 5
    assert text.index(demo.FIRST_QUESTION) < text.index(demo.PARALLEL_QUESTIONS[0]) < text.index(demo.SECOND_QUESTION)


def test_a_stream_without_an_end_is_an_error() -> None:
    with pytest.raises(InternalError, match="answer 1: the stream ended without saying why"):
        run_scenes(FakeClient(finishes=False))


def test_an_empty_answer_fails_the_demonstration() -> None:
    outcomes, _ = run_scenes(FakeClient(words=()))
    assert outcomes[0].tpot_s is None
    assert demo.problems(outcomes) == [f"answer {outcome.name}: the answer is empty" for outcome in outcomes]


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({}, []),
        ({"text": " \n"}, ["the answer is empty"]),
        ({"output_tokens": 0}, ["the answer is empty"]),
        ({"prefill_worker": ""}, ["no prefill worker took part"]),
        ({"decode_worker": "", "kv_bytes": 0}, ["no decode worker took part", "no KV moved"]),
        ({"prefill_worker": "decode-0"}, ["decode-0 did both prefill and decode"]),
        ({"kv_bytes": 0}, ["no KV moved"]),
        ({"prefill_cached_tokens": 0}, []),
        ({"prefill_cached_tokens": 0, "decode_cached_tokens": 0}, ["no part of its prefix was found in a cache"]),
    ],
)
def test_verdict(change: dict[str, Any], problems: list[str]) -> None:
    screen, text = console()
    status = demo.verdict([GOOD, replace(GOOD, name="3", **change)], screen)
    lines = text.getvalue().splitlines()
    if problems:
        assert (status, lines) == (1, [f"failed answer 3: {problem}" for problem in problems])
    else:
        moved = format_bytes(GOOD.kv_bytes + cast(int, change.get("kv_bytes", GOOD.kv_bytes)))
        assert (status, lines) == (0, [f"ok every answer came through both pools; {moved} of KV moved"])


def test_table_fits_a_terminal() -> None:
    text = io.StringIO()
    screen = Console(file=text, width=80, force_terminal=False)
    one_token = replace(GOOD, name="2a", output_tokens=1, tpot_s=None, kv_bytes=48 << 10)
    nowhere = replace(GOOD, name="3", decode_worker="", kv_bytes=0, transport="")
    screen.print(demo.make_table([GOOD, one_token, nowhere], {"prefill-0": 1234567, "decode-0": 12}))
    assert [line.split() for line in text.getvalue().splitlines()[-6:]] == [
        ["1", "100", "64", "/", "80", "3", "250", "20.0", "3.0", "MiB", "prefill-0", "(pid", "1234567)"],
        ["gloo", "decode-0", "(pid", "12)"],
        ["2a", "100", "64", "/", "80", "1", "250", "-", "48", "KiB", "prefill-0", "(pid", "1234567)"],
        ["gloo", "decode-0", "(pid", "12)"],
        ["3", "100", "64", "/", "80", "3", "250", "20.0", "0", "B", "prefill-0", "(pid", "1234567)"],
        ["-"],
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (49152, "48 KiB"),
        (1 << 20, "1.0 MiB"),
        (2_306_867, "2.2 MiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_transport_is_taken_by_its_name() -> None:
    assert demo.demo_config().transfer.transport == "auto"
    assert demo.demo_config(transport="nixl").transfer.transport == "nixl"
    with pytest.raises(ConfigError, match=r"transfer\.transport: 'tcp' is not allowed"):
        demo.demo_config(transport="tcp")
