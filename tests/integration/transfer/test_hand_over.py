"""A prefill and a decode worker, real but for the model: sessions, hand-over, cancels, and nothing left afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from disagg.engine.config import TransferLimits, TransportName, WorkerConfig
from disagg.engine.fake_runner import fake_generate, fake_logprobs
from disagg.proto.messages import RoleName, Sampling, WorkerInfo
from tests.support.transports import NIXL
from tests.support.workers import GatewayStub, open_gateway, prompt_of, running_workers

BLOCK = 16
CHUNK = 64


def _config(role: RoleName, transport: TransportName) -> WorkerConfig:
    return WorkerConfig(
        transport=transport,
        worker_id=f"{role}-0",
        roles=(role,),
        model_path="fake",
        num_blocks=256,
        token_budget=CHUNK,
        # 40 tokens of the fake: a payload that ends inside a block
        transfer=TransferLimits(chunk_bytes=40 * 8, staging_bytes=2 * 40 * 8, heartbeat_s=0.1),
    )


@pytest.fixture(scope="module", params=["gloo", NIXL])
def pair(request: pytest.FixtureRequest) -> Iterator[list[WorkerInfo]]:
    with running_workers(_config("prefill", request.param), _config("decode", request.param)) as infos:
        yield infos


LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]


async def test_every_length_goes_through_both_workers(pair: list[WorkerInfo]) -> None:
    async with open_gateway(pair) as gateway:
        for length in LENGTHS:
            prompt = prompt_of(length)
            answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=9)
            assert answer.token_ids == fake_generate(prompt, 9)
            assert [end.reason for end in answer.ends] == ["length"]
            assert [done.cached_tokens for done in answer.prefilled] == [0]
            assert [moved.kv_bytes for moved in answer.handed_over] == [8 * length]


async def test_many_at_once(pair: list[WorkerInfo]) -> None:
    async with open_gateway(pair) as gateway:
        prompts = [prompt_of(5 + 11 * i) for i in range(24)]
        answers = await asyncio.gather(
            *(gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=20) for prompt in prompts)
        )
        assert [a.token_ids for a in answers] == [fake_generate(p, 20) for p in prompts]


@pytest.mark.parametrize("warm_prefill", [0, 3 * BLOCK, 10 * BLOCK])
@pytest.mark.parametrize("warm_decode", [0, 3 * BLOCK, 10 * BLOCK])
async def test_prefix_hits_on_either_side(pair: list[WorkerInfo], warm_prefill: int, warm_decode: int) -> None:
    prompt = prompt_of(10 * BLOCK + 1)
    async with open_gateway(pair) as gateway:
        if warm_prefill:
            # A first token that ends the answer leaves its prompt in the cache of P alone.
            await gateway.run([*prompt[:warm_prefill], 9], worker="prefill-0", to="decode-0", max_tokens=1)
        if warm_decode:
            await gateway.run([*prompt[:warm_decode], 9], worker="decode-0", max_tokens=1)
        answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=6)
        assert answer.token_ids == fake_generate(prompt, 6)
        assert answer.prefilled[0].cached_tokens == warm_prefill
        assert answer.handed_over[0].cached_tokens == warm_decode
        assert answer.handed_over[0].kv_bytes == 8 * (len(prompt) - warm_decode)


async def test_first_token_can_be_the_last(pair: list[WorkerInfo]) -> None:
    prompt = prompt_of(70)
    first = fake_generate(prompt, 1)
    async with open_gateway(pair) as gateway:
        by_length = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=1)
        stopping = Sampling(temperature=0.0, max_tokens=9, stop_token_ids=(first[0],))
        by_stop = await gateway.run(prompt, worker="prefill-0", to="decode-0", sampling=stopping)
        for answer, reason in ((by_length, "length"), (by_stop, "stop")):
            assert answer.token_ids == first
            assert answer.reason == reason
            assert not answer.handed_over


@pytest.mark.parametrize("num_top", [0, 3])
async def test_every_token_has_its_logprobs(pair: list[WorkerInfo], num_top: int) -> None:
    prompt = prompt_of(70)
    sampling = Sampling(temperature=0.0, max_tokens=6, logprobs=num_top)
    async with open_gateway(pair) as gateway:
        answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", sampling=sampling)
        again = await gateway.run(
            prompt, worker="prefill-0", to="decode-0", sampling=sampling, emitted=answer.token_ids[:2], attempt=2
        )
        silent = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=6)
    expected = [fake_logprobs(token_id, num_top) for token_id in fake_generate(prompt, 6)]
    assert answer.logprobs == dict(enumerate(expected))
    assert again.logprobs == dict(list(enumerate(expected))[2:])
    assert silent.logprobs == {}


async def test_a_bias_counts_on_both_workers(pair: list[WorkerInfo]) -> None:
    prompt = prompt_of(70)
    (first,) = fake_generate(prompt, 1)
    (second,) = fake_generate([*prompt, first + 1], 1)
    bans = ((first, -100.0), (second, -100.0))
    sampling = Sampling(temperature=0.0, max_tokens=5, logit_bias=bans)
    async with open_gateway(pair) as gateway:
        answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", sampling=sampling)
    assert answer.token_ids == fake_generate(prompt, 5, logit_bias=bans)
    assert answer.token_ids[:2] == [first + 1, second + 1]


async def test_emitted_tokens_are_continued_not_repeated(pair: list[WorkerInfo]) -> None:
    prompt = prompt_of(40)
    whole = fake_generate(prompt, 12)
    async with open_gateway(pair) as gateway:
        sampling = Sampling(temperature=0.0, max_tokens=12)
        answer = await gateway.run(
            prompt, worker="prefill-0", to="decode-0", sampling=sampling, emitted=whole[:5], attempt=2
        )
        assert [answer.tokens[i] for i in sorted(answer.tokens)] == whole[5:]
        assert min(answer.tokens) == 5


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.05])
async def test_cancel_leaves_nothing(pair: list[WorkerInfo], delay_s: float) -> None:
    async with open_gateway(pair) as gateway:
        keys = [gateway.submit(prompt_of(200), worker="prefill-0", to="decode-0", max_tokens=1000)[0] for _ in range(4)]
        await asyncio.sleep(delay_s)
        for key in keys:
            gateway.cancel(key)
        await gateway.wait_until_idle()
        prompt = prompt_of(33)
        answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=5)
        assert answer.token_ids == fake_generate(prompt, 5)


async def test_a_lost_gateway_leaves_nothing(pair: list[WorkerInfo]) -> None:
    gateway = GatewayStub()
    for info in pair:
        await gateway.connect(info)
    _, answer = gateway.submit(prompt_of(100), worker="prefill-0", to="decode-0", max_tokens=3000)
    await asyncio.wait_for(answer.first_token.wait(), 60)
    await gateway.close()
    prompt = prompt_of(33)
    async with open_gateway(pair) as gateway:  # waits until both workers are idle
        again = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=5)
    assert again.token_ids == fake_generate(prompt, 5)


async def test_deadline_ends_everywhere(pair: list[WorkerInfo]) -> None:
    async with open_gateway(pair) as gateway:
        answer = await gateway.run(prompt_of(100), worker="prefill-0", to="decode-0", max_tokens=3900, timeout_s=0.05)
        assert answer.reason == "deadline"


async def test_no_room_is_refused_and_not_a_fault(pair: list[WorkerInfo]) -> None:
    async with open_gateway(pair) as gateway:
        # Each takes 34 of the 256 blocks (20 tokens, 512 of reserve) and goes on for long: the eighth finds no room.
        taken = [gateway.submit(prompt_of(20), worker="prefill-0", to="decode-0", max_tokens=3000) for _ in range(7)]
        await asyncio.gather(*(asyncio.wait_for(answer.first_token.wait(), 60) for _, answer in taken))
        refused = await gateway.run(prompt_of(20), worker="prefill-0", to="decode-0", max_tokens=3000)
        assert refused.reason == "refused"
        assert not refused.tokens
        assert [answer.ends for _, answer in taken] == [[]] * 7
        for key, _ in taken:
            gateway.cancel(key)


async def test_a_dispatch_that_no_role_can_run_is_refused(pair: list[WorkerInfo]) -> None:
    async with open_gateway(pair) as gateway:
        answer = await gateway.run(prompt_of(5), worker="prefill-0")
        assert answer.reason == "refused"


async def test_preemption_changes_nothing(pair: list[WorkerInfo]) -> None:
    """More output than the 256 blocks hold, beyond what was reserved: some sequences are suspended."""
    prompts = [prompt_of(20) for _ in range(7)]
    num_tokens = 700
    async with open_gateway(pair) as gateway:
        answers = await asyncio.gather(
            *(gateway.run(p, worker="prefill-0", to="decode-0", max_tokens=num_tokens) for p in prompts)
        )
        assert [answer.token_ids for answer in answers] == [fake_generate(p, num_tokens) for p in prompts]
