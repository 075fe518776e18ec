"""Workers with KV in 8 bits: an answer has the same tokens where the prompt was computed, behind a hand-over between
other numbers of ranks, behind a fetch and from a tier; and none goes with a worker whose KV has another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disagg.engine.config import TierOptions, TransferLimits, WorkerConfig
from disagg.proto.messages import RoleName
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint
from tests.support.workers import open_gateway, prompt_of, running_workers

TOKEN_BYTES = 3 * 2 * 4 * (8 + 2)
"""Three layers, K and V, four heads of eight numbers and a scale."""
NUM_TOKENS = 20
BOTH: tuple[RoleName, ...] = ("prefill", "decode")


def config_of(folder: Path, name: str, roles: tuple[RoleName, ...], **options: Any) -> WorkerConfig:
    """Chunks of 40 tokens."""
    fields: dict[str, Any] = {
        "worker_id": name,
        "roles": roles,
        "model_path": str(folder),
        "dtype": "float32",
        "kv_cache_dtype": "int8",
        "num_blocks": 128,
        "max_model_len": 400,
        "token_budget": 64,
        "decode_reserve_tokens": 32,
        "watermark": 0.0,
        "transport": "shm",
        "transfer": TransferLimits(chunk_bytes=40 * TOKEN_BYTES, staging_bytes=120 * TOKEN_BYTES),
        "fetch": True,
    }
    return WorkerConfig(**fields | options)


async def test_an_answer_has_the_same_tokens_wherever_its_kv_comes_from(tmp_path: Path) -> None:
    folder = make_checkpoint("llama_odd_vocab", tmp_path / "model")
    configs = (
        config_of(folder, "c0", BOTH, num_blocks=32, tiers=TierOptions(host_bytes=1 << 20)),
        config_of(folder, "p0", ("prefill",), tp=2),
        config_of(folder, "d0", ("decode",)),
        config_of(folder, "d1", ("decode",), kv_cache_dtype="auto"),
    )
    prompt, *others, last = [[token % VOCAB_SIZE for token in prompt_of(300)] for _ in range(4)]
    with running_workers(*configs) as infos:
        assert [info.kv_layout.bytes_per_token for info in infos] == [TOKEN_BYTES] * 3 + [3 * 2 * 4 * 8 * 4]
        async with open_gateway(infos) as gateway:
            expected = (await gateway.run(prompt, worker="c0", max_tokens=NUM_TOKENS)).token_ids
            handed_over = await gateway.run(prompt, worker="p0", to="d0", max_tokens=NUM_TOKENS)
            assert handed_over.token_ids == expected
            for other in others:  # the cache of c0 holds one prompt and a half
                await gateway.run(other, worker="c0", max_tokens=NUM_TOKENS)
            loaded = await gateway.run(prompt, worker="c0", max_tokens=NUM_TOKENS)
            assert (loaded.token_ids, loaded.ends[0].cached_tokens) == (expected, 256)

            await gateway.run(last, worker="c0", max_tokens=1)
            changed = [*last[:280], *prompt[:60]]
            fetched = await gateway.run(changed, worker="p0", to="d0", fetch_from="c0", end_token=256, max_tokens=1)
            (fetch,) = fetched.fetched
            assert (fetch.outcome, fetch.kv_bytes) == ("done", 256 * TOKEN_BYTES)
            assert fetched.token_ids == (await gateway.run(changed, worker="c0", max_tokens=1)).token_ids

            refused = await gateway.run(prompt, worker="p0", to="d1", max_tokens=NUM_TOKENS)
            assert refused.reason == "refused"
            assert "KV layouts differ: KV in int8 and in float32 (model.kv_cache_dtype)" in refused.ends[0].detail
