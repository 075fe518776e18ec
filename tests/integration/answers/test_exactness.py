"""Token-exact in fp32: through P and D, in one worker, and by `transformers` the same ids, whatever the batch and the
caches.

Three processes a model: `prefill-0` and `decode-0` over gloo or NIXL, and `colocated-0` with both roles. A step takes
64 tokens and a KV message 40, so that prompts are computed, and moved, in several uneven pieces.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from disagg.cluster.models.catalog import resolve_model
from disagg.engine.config import TransferLimits, TransportName, WorkerConfig
from disagg.kernels.dispatch import packing_name
from disagg.proto.messages import RoleName, Sampling, WorkerInfo
from tests.support import reference
from tests.support.stepping import generate, make_runner, make_sequence
from tests.support.tiny_models import make_checkpoint
from tests.support.transports import needs_nixl
from tests.support.workers import open_gateway, running_workers

BLOCK = 16
CHUNK = 64
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]
NUM_TOKENS = 20
SLOW = ("mistral", "qwen2", "qwen3")
MODELS = ["llama3_rope", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW), "gemma3"]
"""Those that are slow here are compared with `transformers` in one process by each run, as all families are. Gemma 3
has windows."""
REAL_MODEL = "smollm2-135m"
REAL_LENGTHS = [BLOCK + 1, 3 * CHUNK + 7]
ALL_MODELS = [*MODELS, pytest.param(REAL_MODEL, marks=pytest.mark.model)]
OVER_NIXL = [
    pytest.param(("llama3_rope", "nixl"), marks=needs_nixl),
    pytest.param((REAL_MODEL, "nixl"), marks=[pytest.mark.model, pytest.mark.slow, needs_nixl]),
]
SLOW_FOR_REAL = [*MODELS, pytest.param(REAL_MODEL, marks=[pytest.mark.model, pytest.mark.slow])]
"""What the tiny models show as well, at a tenth of the time."""


@dataclass
class Served:
    name: str
    folder: Path
    workers: list[WorkerInfo]
    vocab_size: int
    random: random.Random
    transport: str

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(length)]

    def reference(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        return reference.generate(self.folder, prompt, num_tokens)


def _config(
    worker_id: str, roles: tuple[RoleName, ...], folder: Path, bytes_per_token: int, transport: TransportName = "gloo"
) -> WorkerConfig:
    return WorkerConfig(
        transport=transport,
        worker_id=worker_id,
        roles=roles,
        model_path=str(folder),
        dtype="float32",
        num_blocks=512,
        max_model_len=1024,
        token_budget=CHUNK,
        decode_reserve_tokens=64,
        transfer=TransferLimits(chunk_bytes=40 * bytes_per_token, staging_bytes=120 * bytes_per_token),
    )


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    transport: TransportName = "gloo" if isinstance(request.param, str) else request.param[1]
    kind = request.param if isinstance(request.param, str) else request.param[0]
    if kind == REAL_MODEL:
        folder, vocab_size, bytes_per_token = resolve_model(kind), 49152, 30 * 2 * 3 * 64 * 4
    else:
        folder, vocab_size = make_checkpoint(kind, tmp_path_factory.mktemp("models") / kind), 384
        bytes_per_token = (4 if kind == "gemma3" else 3) * 2 * 2 * (32 if kind in ("qwen3", "gemma3") else 16) * 4
    configs = [
        _config("prefill-0", ("prefill",), folder, bytes_per_token, transport),
        _config("decode-0", ("decode",), folder, bytes_per_token, transport),
        _config("colocated-0", ("prefill", "decode"), folder, bytes_per_token, transport),
    ]
    with running_workers(*configs) as infos:
        assert [info.kv_layout.bytes_per_token for info in infos] == [bytes_per_token] * 3
        yield Served(kind, folder, infos, vocab_size, random.Random(kind), transport)


@pytest.mark.parametrize("served", [*ALL_MODELS, *OVER_NIXL], indirect=True)
async def test_greedy_is_that_of_transformers_alone_and_in_a_batch(served: Served) -> None:
    lengths = REAL_LENGTHS if served.name == REAL_MODEL else LENGTHS
    prompts = [served.prompt(length) for length in lengths]
    expected = [served.reference(prompt) for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) == len(lengths)
    async with open_gateway(served.workers) as gateway:
        for prompt, ids in zip(prompts, expected, strict=True):
            alone = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=NUM_TOKENS)
            assert alone.token_ids == ids
            assert alone.handed_over[0].transport == served.transport
        # Prompts of their own, because the ones above are cached now; mixed with others that share the batch.
        batch = [served.prompt(length) for length in lengths]
        apart, together = await asyncio.gather(
            asyncio.gather(*(gateway.run(p, worker="prefill-0", to="decode-0", max_tokens=NUM_TOKENS) for p in batch)),
            asyncio.gather(*(gateway.run(p, worker="colocated-0", max_tokens=NUM_TOKENS) for p in batch)),
        )
        expected = [served.reference(prompt) for prompt in batch]
        assert [answer.token_ids for answer in apart] == expected
        assert [answer.token_ids for answer in together] == expected


@pytest.mark.parametrize("served", SLOW_FOR_REAL, indirect=True)
@pytest.mark.parametrize("warm_prefill", ["none", "partial", "full"])
@pytest.mark.parametrize("warm_decode", ["none", "partial", "full"])
async def test_prefix_hits_change_nothing(served: Served, warm_prefill: str, warm_decode: str) -> None:
    cached = {"none": 0, "partial": 2 * BLOCK, "full": 6 * BLOCK}
    prompt = served.prompt(6 * BLOCK + 5)
    on_prefill, on_decode = cached[warm_prefill], cached[warm_decode]
    async with open_gateway(served.workers) as gateway:
        if on_prefill:
            await gateway.run([*prompt[:on_prefill], 1], worker="prefill-0", to="decode-0", max_tokens=1)
        if on_decode:
            await gateway.run([*prompt[:on_decode], 1], worker="decode-0", max_tokens=1)
        answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=NUM_TOKENS)
        assert answer.token_ids == served.reference(prompt)
        assert answer.prefilled[0].cached_tokens == on_prefill
        assert answer.handed_over[0].cached_tokens == on_decode


@pytest.mark.parametrize("served", ALL_MODELS, indirect=True)
async def test_a_second_turn_sends_only_what_decode_lacks(served: Served) -> None:
    first = served.prompt(50)
    async with open_gateway(served.workers) as gateway:
        answer = await gateway.run(first, worker="prefill-0", to="decode-0", max_tokens=NUM_TOKENS)
        second = first + answer.token_ids + served.prompt(9)
        again = await gateway.run(second, worker="prefill-0", to="decode-0", max_tokens=NUM_TOKENS)
        assert again.token_ids == served.reference(second)
        # D has also what it decoded: 50 + 19 tokens with KV are four full blocks. P has its prompt: three.
        assert again.handed_over[0].cached_tokens == 4 * BLOCK
        assert again.prefilled[0].cached_tokens == 3 * BLOCK


@pytest.mark.parametrize("served", SLOW_FOR_REAL, indirect=True)
async def test_seeded_sampling_is_the_same_in_both_modes(served: Served) -> None:
    sampling = [
        Sampling(temperature=0.9, seed=7, max_tokens=NUM_TOKENS),
        Sampling(temperature=1.3, top_k=40, top_p=0.9, seed=8, max_tokens=NUM_TOKENS),
        Sampling(temperature=0.8, min_p=0.02, repetition_penalty=1.2, seed=9, max_tokens=NUM_TOKENS),
        Sampling(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.4, seed=2**63 + 5, max_tokens=NUM_TOKENS),
        Sampling(temperature=0.0, repetition_penalty=1.4, max_tokens=NUM_TOKENS),
    ]
    prompts = [served.prompt(length) for length in (5, 33, 70, 64, 20)]
    async with open_gateway(served.workers) as gateway:
        for how, prompt in zip(sampling, prompts, strict=True):
            apart = await gateway.run(prompt, worker="prefill-0", to="decode-0", sampling=how)
            together = await gateway.run(prompt, worker="colocated-0", sampling=how)
            assert len(apart.token_ids) == NUM_TOKENS
            assert apart.token_ids == together.token_ids
        other = await gateway.run(prompts[0], worker="colocated-0", sampling=Sampling(seed=1, max_tokens=NUM_TOKENS))
        same = await gateway.run(prompts[0], worker="colocated-0", sampling=Sampling(seed=2, max_tokens=NUM_TOKENS))
        assert other.token_ids != same.token_ids


@pytest.mark.parametrize("served", SLOW_FOR_REAL, indirect=True)
async def test_logprobs_are_those_of_transformers_and_the_same_in_both_modes(served: Served) -> None:
    prompts = [served.prompt(length) for length in (1, 33, 64, 70)]
    greedy = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=5)
    banned = served.reference(prompts[1], 1)[0]
    sampling = [
        greedy,
        # Log-probabilities are those of the model, before bias, penalties, temperature and filters.
        msgspec.structs.replace(greedy, logit_bias=((banned, -100.0), (7, 2.0)), repetition_penalty=1.3),
        msgspec.structs.replace(greedy, temperature=1.3, top_k=40, top_p=0.9, seed=8),
        msgspec.structs.replace(greedy, logprobs=0),
    ]
    async with open_gateway(served.workers) as gateway:
        for how, prompt in zip(sampling, prompts, strict=True):
            apart = await gateway.run(prompt, worker="prefill-0", to="decode-0", sampling=how)
            together = await gateway.run(prompt, worker="colocated-0", sampling=how)
            output = apart.token_ids
            assert (together.token_ids, together.logprobs) == (output, apart.logprobs)
            expected = reference.logprobs(served.folder, prompt, output)
            found = [apart.logprobs[index] for index in range(NUM_TOKENS)]
            rows = torch.arange(NUM_TOKENS)
            _assert_close([each.logprob for each in found], expected[rows, output])
            assert {len(each.top_ids) for each in found} == {how.logprobs}
            if how.logprobs:
                _assert_close([each.top_logprobs for each in found], expected.topk(how.logprobs).values)
                of_top_ids = expected.gather(1, torch.tensor([each.top_ids for each in found]))
                _assert_close([each.top_logprobs for each in found], of_top_ids)
        assert banned not in (await gateway.run(prompts[1], worker="colocated-0", sampling=sampling[1])).token_ids


@pytest.mark.parametrize("served", SLOW_FOR_REAL, indirect=True)
async def test_logprobs_of_prompts_are_those_of_transformers_whatever_is_cached(served: Served) -> None:
    how = Sampling(temperature=0.0, max_tokens=2, logprobs=0, prompt_logprobs=5)
    async with open_gateway(served.workers) as gateway:
        for length in (1, 2, BLOCK + 1, 3 * CHUNK + 7):
            prompt = served.prompt(length)
            for worker in ("colocated-0", "prefill-0"):  # so that all of it is cached
                peer = "decode-0" if worker == "prefill-0" else None
                await gateway.run(prompt, worker=worker, to=peer, max_tokens=2)
            apart = await gateway.run(prompt, worker="prefill-0", to="decode-0", sampling=how)
            together = await gateway.run(prompt, worker="colocated-0", sampling=how)
            found = apart.logprobs[0].prompt
            assert len(found) == length - 1
            assert together.logprobs[0].prompt == found
            assert apart.logprobs[1].prompt == ()
            assert apart.token_ids == served.reference(prompt, 2)
            if found:
                expected = reference.logprobs(served.folder, prompt[:1], prompt[1:])
                _assert_close([each.logprob for each in found], expected[torch.arange(length - 1), prompt[1:]])
                _assert_close([each.top_logprobs for each in found], expected.topk(5).values)
                of_top_ids = expected.gather(1, torch.tensor([each.top_ids for each in found]))
                _assert_close([each.top_logprobs for each in found], of_top_ids)


def _assert_close(found: Sequence[object], expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("served", SLOW_FOR_REAL, indirect=True)
async def test_a_retry_goes_on_where_the_first_attempt_stopped(served: Served) -> None:
    prompt = served.prompt(45)
    whole = served.reference(prompt)
    seeded = Sampling(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=11, max_tokens=NUM_TOKENS)
    async with open_gateway(served.workers) as gateway:
        answer = await gateway.run(
            prompt, worker="prefill-0", to="decode-0", max_tokens=NUM_TOKENS, emitted=whole[:7], attempt=2
        )
        assert [answer.tokens[index] for index in sorted(answer.tokens)] == whole[7:]
        sampled = await gateway.run(prompt, worker="colocated-0", sampling=seeded)
        again = await gateway.run(
            prompt, worker="prefill-0", to="decode-0", sampling=seeded, emitted=sampled.token_ids[:9], attempt=2
        )
        assert [again.tokens[index] for index in sorted(again.tokens)] == sampled.token_ids[9:]


async def test_workers_with_shared_weights_answer_as_one_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "qwen3", dtype=torch.bfloat16)
    dice = random.Random(9)
    prompts = [[dice.randrange(384) for _ in range(length)] for length in (1, BLOCK, CHUNK)]
    own, expected = make_runner(folder, dtype="bfloat16"), []
    for prompt in prompts:
        sequence = make_sequence(prompt, list(range(8)))
        generate(own, sequence, NUM_TOKENS)
        expected.append(sequence.token_ids[len(prompt) :])
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    configs = [
        msgspec.structs.replace(config, dtype="bfloat16", share_weights=True)
        for config in (
            _config("prefill-0", ("prefill",), folder, 3 * 2 * 2 * 32 * 2),
            _config("decode-0", ("decode",), folder, 3 * 2 * 2 * 32 * 2),
        )
    ]
    with running_workers(*configs) as infos:
        async with open_gateway(infos) as gateway:
            for prompt, ids in zip(prompts, expected, strict=True):
                answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=NUM_TOKENS)
                assert answer.token_ids == ids
    num_files = 0 if packing_name(torch.bfloat16) is None else 1
    assert len(list((tmp_path / "packed").glob("*.weights"))) == num_files
