"""Specs that no gateway of ours sends, but that the wire can carry: each ends its own attempt, in one way or another.

The worker goes on, and a request beside it has the answer that it has alone.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg.engine.commands import Add, Command, Ended, Event, Gather, Join, Release, Reserve, Scatter
from disagg.engine.core.engine_core import EngineCore
from disagg.proto.ids import BlockHash, RequestId
from disagg.proto.messages import Sampling, SequenceSpec, TokenLogprobs, decoder, encode
from tests.support.engine import (
    GATEWAY,
    VOCAB_SIZE,
    assert_idle,
    end_of,
    handle_all,
    key_of,
    make_core,
    make_prompt,
    make_spec,
    new_buffer,
    token_ids_of,
)
from tests.support.sampling import SampledRunner

INNOCENT = make_spec("innocent", make_prompt(30, seed=5), max_tokens=6)
int64 = st.one_of(
    st.sampled_from([-(1 << 63), -1, 0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 63) - 1]), st.integers(-5, 50)
)
floats = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1e-38, 1e-320, 1e300, -1e300, 0.5, 1.0, 2.0]))
hashes = st.one_of(st.sampled_from([b"", b"h", b"x" * 16]), st.binary(min_size=1, max_size=20))
samplings = st.builds(
    Sampling,
    temperature=floats,
    top_p=floats,
    top_k=int64,
    min_p=floats,
    seed=int64,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    stop_token_ids=st.lists(int64, max_size=3).map(tuple),
    max_tokens=int64,
    min_tokens=int64,
    logit_bias=st.lists(st.tuples(int64, floats), max_size=2).map(tuple),
    logprobs=int64,
)
ids = st.one_of(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([VOCAB_SIZE, 0xFFFFFFFF]))
plain_ids = st.tuples(st.integers(1, 50), st.integers(0, 9)).map(lambda it: make_prompt(*it))


@st.composite
def specs(draw: st.DrawFn) -> SequenceSpec:
    """Some of the fields are odd."""
    prompt = draw(st.one_of(plain_ids, plain_ids, st.lists(ids, max_size=40)))
    odd: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "emitted_token_ids": st.lists(st.one_of(int64, ids), max_size=4).map(tuple),
                "root_hash": hashes.map(BlockHash),
                "block_hashes": st.lists(hashes.map(BlockHash), max_size=3).map(tuple),
                "priority": int64,
                "timeout_s": floats,
                "tenant_tag": st.binary(max_size=3),
            },
        )
    )
    spec = make_spec("odd", prompt)
    return msgspec.structs.replace(spec, sampling=draw(samplings), **odd)


def commands_of(spec: SequenceSpec, way: str) -> list[Command]:
    key, count = spec.key, spec.num_known_tokens
    if way == "reserve":
        moved: list[Command] = [Scatter(key, 0, 0, count, new_buffer(max(count, 1)))]
        return [Reserve(spec), *moved, Join(key, 1, TokenLogprobs(-1.0) if spec.sampling.logprobs >= 0 else None)]
    return [Add(spec, hold_after_prefill=way == "hold")]


def run(core: EngineCore) -> list[Event]:
    events: list[Event] = []
    for _ in range(60):
        events += core.step(0.0)
    return events


ALONE = token_ids_of(
    handle_all(alone := make_core(runner=SampledRunner(40)), Add(INNOCENT)) + run(alone), INNOCENT.request_id
)


LONG = make_spec("odd", make_prompt(50), max_tokens=4)


@example(msgspec.structs.replace(LONG, block_hashes=(BlockHash(b"x" * 16),) * 2), "add", (0, 1))
@example(msgspec.structs.replace(LONG, block_hashes=(BlockHash(b""),)), "reserve", (0, 1))
@example(msgspec.structs.replace(LONG, sampling=Sampling(top_k=1 << 40)), "hold", (0, 50))
@settings(max_examples=100, deadline=None, derandomize=True)
@given(spec=specs(), way=st.sampled_from(["add", "hold", "reserve"]), gather=st.tuples(int64, int64))
def test_an_odd_spec_ends_its_own_attempt_only(spec: SequenceSpec, way: str, gather: tuple[int, int]) -> None:
    spec = decoder(SequenceSpec).decode(encode(spec))  # what the wire can carry
    core = make_core(runner=SampledRunner(40), token_budget=256)
    events = handle_all(core, Add(INNOCENT), *commands_of(spec, way)) + run(core)
    events += handle_all(core, Gather(spec.key, 0, *gather, new_buffer(1)))
    events += handle_all(core, Release(spec.key)) + run(core)
    assert token_ids_of(events, "innocent") == ALONE
    assert len(ALONE) == 6
    assert end_of(events, "innocent") == Ended(key_of("innocent"), GATEWAY, "length")
    assert sum(isinstance(event, Ended) and event.key.request_id == RequestId("odd") for event in events) <= 1
    assert_idle(core)
