"""What the compiler makes of the other kernels for a Hopper GPU: they compile, and no register is spilled."""

from __future__ import annotations

import pytest

from tests.support.triton_compile import Case, compile_kernels

TYPES = {
    "temperatures_ptr": "*fp32",
    "groups_ptr": "*i64",
    "bounds_ptr": "*i64",
    "counts_ptr": "*i32",
    "collected_ptr": "*i64",
    "masses_ptr": "*fp64",
    "weights_ptr": "*i64",
    "ids_ptr": "*i64",
    "values_ptr": "*fp32",
    "top_k_ptr": "*i32",
    "top_p_ptr": "*fp64",
    "min_p_ptr": "*fp64",
    "uniform_ptr": "*fp64",
    "seeds_ptr": "*i64",
    "indices_ptr": "*i64",
    "positions_ptr": "*i64",
    "slots_ptr": "*i64",
    "block_ids_ptr": "*i32",
    "eps": "fp32",
    "number": "fp32",
    "key_scale": "fp32",
    "value_scale": "fp32",
    "hidden": "i32:16",
    "features": "i32:16",
    "vocab_size": "i32:16",
    "capacity": "i32:16",
    "row_stride": "i32:16",
    "token_stride": "i32:16",
    "x_stride": "i32:16",
    "y_stride": "i32:16",
    "residual_stride": "i32:16",
    "block_stride": "i32:16",
    "plane_stride": "i32:16",
    "head_stride": "i32:16",
    "key_block_stride": "i32:16",
    "value_block_stride": "i32:16",
}
"""Of arguments that have one type wherever they occur. Other pointers are to bf16, other numbers are i32."""


def case(
    module: str, kernel: str, arguments: str, warps: int, types: dict[str, str] | None = None, **constants: int
) -> Case:
    """With the arguments that are no constants by name."""
    names = arguments.split()
    found = {name: TYPES.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    found |= {name: kind for name, kind in (types or {}).items() if name in names}
    return Case(
        module=f"disagg.kernels.triton.{module}", kernel=kernel, types=found, constants={**constants}, num_warps=warps
    )


RANKED = "logits_ptr temperatures_ptr"
DRAWN = "temperatures_ptr top_k_ptr top_p_ptr min_p_ptr uniform_ptr out_ptr vocab_size"


def rope_case(cache: str, dim: int, norm: int, *, rest: int = 0, changed: int = 0) -> Case:
    """`changed`: with one more than the weights, and a scale of q."""
    arguments = (
        "qkv_ptr q_norm_ptr k_norm_ptr squares_ptr query_scale_ptr positions_ptr cos_ptr sin_ptr slots_ptr q_out_ptr "
        "key_ptr value_ptr eps key_scale value_scale row_stride key_block_stride value_block_stride q_size k_size"
    )
    sizes = {"NUM_Q": 32, "NUM_KV": 8, "BLOCK_SIZE": 16, "HALF": (dim - rest) // 2, "REST": rest, "COLUMNS": 64}
    return case(
        "rope_write",
        "_kernel",
        arguments,
        4,
        {"key_ptr": cache, "value_ptr": cache, "squares_ptr": "*fp32"},
        **sizes,
        REST_COLUMNS=max(1, rest),
        HEADS=8,
        NORM_Q=norm,
        NORM_K=norm,
        PLUS_ONE=changed,
        TURN=1,
        QUERY_SCALE=changed,
        FP8=int(cache == "*fp8e4nv"),
    )


def copy_case(word: str, row: int, columns: int, gather: int) -> Case:
    arguments = "cache_ptr flat_ptr block_ids_ptr start num_tokens num_heads block_stride plane_stride head_stride"
    sizes = {"BLOCK_SIZE": 16, "ROW": row, "COLUMNS": columns, "TOKENS": 2048 // columns, "GATHER": gather}
    return case("copy", "_copy_kernel", arguments, 4, {"cache_ptr": word, "flat_ptr": word}, **sizes)


EXPERT_TYPES = {
    **dict.fromkeys(("logits_ptr", "choice_bias_ptr", "weights_ptr", "shared_weights_ptr"), "*fp32"),
    **dict.fromkeys(("ids_ptr", "places_ptr", "sources_ptr", "offsets_ptr"), "*i32"),
    **dict.fromkeys(("scale", "alpha", "limit"), "fp32"),
    "counts_ptr": "*i64",
}


def product_case(rows: int, gather: int) -> Case:
    arguments = "x_ptr weight_ptr bias_ptr out_ptr sources_ptr offsets_ptr x_stride num_columns depth num_local"
    types = {"sources_ptr": "*i32", "offsets_ptr": "*i32", "num_columns": "i32:16", "depth": "i32:16"}
    sizes = {"TOP_K": 8, "GATHER": gather, "HAS_BIAS": 1, "EXPERTS": 128, "ROWS": rows, "COLUMNS": 64, "DEPTH": 64}
    return case("experts", "_product_kernel", arguments, 4, types, **sizes)


LORA_TYPES = {
    **dict.fromkeys(("hidden_ptr", "scales_ptr"), "*fp32"),
    **dict.fromkeys(("ranks_ptr", "slots_ptr"), "*i32"),
}

CASES = [
    case("norm", "_rms_norm_kernel", "x_ptr weight_ptr out_ptr num_rows heads token_stride head_stride eps", 8,
         SIZE=4096, ROWS=1, BLOCK=4096, PLUS_ONE=0),
    case("norm", "_add_rms_norm_kernel", "x_ptr residual_ptr weight_ptr out_ptr sum_ptr num_rows x_stride "
         "residual_stride eps", 16, SIZE=28672, ROWS=1, BLOCK=32768, PLUS_ONE=1),
    case("silu", "_silu_mul_kernel", "gate_up_ptr out_ptr row_stride features", 4, BLOCK=1024, GELU=0),
    case("silu", "_silu_mul_kernel", "gate_up_ptr out_ptr row_stride features", 4, BLOCK=1024, GELU=1),
    case("pointwise", "_pointwise_kernel", "x_ptr out_ptr row_stride features number", 4, BLOCK=1024, FUNCTION=2),
    case("pointwise", "_add_kernel", "x_ptr y_ptr out_ptr x_stride y_stride features", 4, BLOCK=1024),
    case("lora", "_shrink_kernel", "x_ptr a_ptr ranks_ptr slots_ptr hidden_ptr x_stride inputs", 4, LORA_TYPES, PARTS=3,
         RANK=64, BLOCK=128),
    case("lora", "_expand_kernel", "hidden_ptr b_ptr ranks_ptr scales_ptr slots_ptr y_ptr y_stride outputs first_end "
         "second_end", 4, LORA_TYPES, PARTS=3, RANK=64, BLOCK=128),
    case("embed", "_embed_kernel", "ids_ptr table_ptr out_ptr vocab_size row_stride hidden", 4, BLOCK=1024),
    case("argmax", "_chunk_kernel", "logits_ptr best_ptr ids_ptr vocab_size row_stride", 8,
         {"best_ptr": "*fp32", "ids_ptr": "*i32"}, CHUNK=4096),
    case("argmax", "_row_kernel", "best_ptr ids_ptr out_ptr num_chunks", 1,
         {"best_ptr": "*fp32", "ids_ptr": "*i32", "out_ptr": "*i64"}, CHUNKS=32),
    case("ranking", "_groups_kernel", f"{RANKED} groups_ptr bounds_ptr counts_ptr vocab_size row_stride", 8,
         GROUPS=64, GROUP=64),
    case("ranking", "_bounds_kernel", "groups_ptr bounds_ptr num_groups num", 4, TILE=64),
    case("ranking", "_collect_kernel", f"{RANKED} bounds_ptr counts_ptr collected_ptr masses_ptr weights_ptr "
         "vocab_size row_stride capacity", 8, CHUNK=4096),
    case("ranking", "_rank_kernel", "collected_ptr counts_ptr ids_ptr values_ptr capacity num", 4, TILE=64),
    case("sampling", "_uniform_kernel", "seeds_ptr indices_ptr out_ptr num", 4, {"out_ptr": "*fp64"}, BLOCK=128),
    case("sampling", "_draw_kernel", f"ids_ptr values_ptr masses_ptr {DRAWN} num_chunks", 4, {"out_ptr": "*i64"},
         KNOWN=256, COLUMNS=256, CHUNKS=32, IS_ALL=0),
    case("sampling", "_search_kernel", f"logits_ptr values_ptr ids_ptr weights_ptr {DRAWN} row_stride num_chunks", 16,
         {"out_ptr": "*i64"}, KNOWN=256, CHUNK=512, WAYS=16, COLUMNS=4096, CHUNKS=32),
    rope_case("*bf16", 128, 0),
    rope_case("*fp8e4nv", 80, 1),
    rope_case("*bf16", 128, 2, rest=64, changed=1),
    case("rope_write", "_head_squares_kernel", "qkv_ptr out_ptr row_stride q_size k_size", 4, {"out_ptr": "*fp32"},
         BLOCK=1024),
    copy_case("*i64", 32, 32, 1),
    copy_case("*i64", 32, 32, 0),
    copy_case("*u8", 10, 16, 1),
    case("copy", "_digest_kernel", "words_ptr sums_ptr num_words seed", 4,
         {"words_ptr": "*i64", "sums_ptr": "*i64", "seed": "i64"}, BLOCK=1024),
    case("experts", "_route_kernel", "logits_ptr choice_bias_ptr ids_ptr weights_ptr scale", 4, EXPERT_TYPES,
         EXPERTS=256, TOP_K=8, SCORE=2, GROUPS=8, TOP_GROUPS=4, TWO_LARGEST=1, RENORMALIZE=1, HAS_BIAS=1,
         GROUPS_BLOCK=8, MEMBERS_BLOCK=32),
    case("experts", "_place_kernel", "ids_ptr places_ptr sources_ptr offsets_ptr counts_ptr num_slots first_expert "
         "num_local", 4, EXPERT_TYPES, HAS_COUNTS=1, SLOTS=1024),
    product_case(16, 1), product_case(64, 0),
    case("experts", "_gate_kernel", "gate_up_ptr out_ptr offsets_ptr num_local features alpha limit", 4, EXPERT_TYPES,
         GATE=2, BLOCK=1024),
    case("experts", "_combine_kernel", "results_ptr places_ptr weights_ptr shared_ptr shared_weights_ptr out_ptr "
         "hidden", 4, EXPERT_TYPES, TOP_K=8, HAS_SHARED=1, HAS_SHARED_WEIGHTS=1, BLOCK=1024),
]  # fmt: skip


@pytest.mark.slow
def test_every_kernel_compiles_without_spilling() -> None:
    """Not in `make test`: a minute of compiling."""
    used = compile_kernels(CASES)
    assert {f"{case.module}.{case.kernel}": usage.spilled_bytes for case, usage in zip(CASES, used, strict=True)} == {
        f"{case.module}.{case.kernel}": 0 for case in CASES
    }
