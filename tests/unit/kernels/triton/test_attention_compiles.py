"""What the compiler makes of the attention kernels for a Hopper GPU: next to no spilled registers, and programs fit
beside each other on a multiprocessor, as the launch shapes count on."""

from __future__ import annotations

import pytest

from tests.support.attention_cases import (
    decode_case,
    formed,
    join_case,
    join_prefill_case,
    latent_decode_case,
    latent_joins,
    latent_prefill_case,
    prefill_case,
)
from tests.support.triton_compile import compile_kernels

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for programs."""
REGISTERS = 65536
"""Of a multiprocessor."""
SPILLED_OF_FP8 = 8
"""Bytes a thread, of the decode kernel for fp8 and heads of 128: two registers with Triton 3.7, none with 3.6."""

SPILLED_OF_LATENTS = {"*bf16": 256, "*fp8e4nv": 1024}
"""Bytes a thread, of 64 heads of 512 numbers, by the dtype of the latents; in bf16 next to none of them in the loop
over tiles."""


@pytest.mark.slow
def test_two_decode_programs_fit_on_a_multiprocessor() -> None:
    fp8 = decode_case("bf16", "fp8e4nv", 128, 4, 16)
    cases = [
        decode_case("bf16", "bf16", 128, 4, 16),
        decode_case("bf16", "bf16", 128, 8, 64),
        decode_case("bf16", "bf16", 64, 3, 16),
        decode_case("fp16", "fp16", 80, 1, 32),
        fp8,
        decode_case("bf16", "fp8e4nv", 64, 8, 64),
        join_case(),
        join_prefill_case(),
        formed(decode_case("bf16", "bf16", 256, 4, 16), window=512, soft_cap=50.0),  # Gemma
        formed(decode_case("bf16", "bf16", 64, 8, 64), window=128, sinks=True),  # gpt-oss
        formed(join_case(), window=128, sinks=True),
        formed(join_prefill_case(), sinks=True),
    ]
    for case, usage in zip(cases, compile_kernels(cases), strict=True):
        assert usage.spilled_bytes <= (SPILLED_OF_FP8 if case is fp8 else 0), case
        assert 2 * usage.shared_bytes <= SHARED_BYTES, case
        assert 2 * usage.registers * 32 * case.num_warps <= REGISTERS, case


@pytest.mark.slow
def test_prefill_programs_fit_on_a_multiprocessor_and_two_where_boxes_are_fetched() -> None:
    cases = [
        prefill_case("bf16", "bf16", 128, 4, 16, 4096),
        prefill_case("bf16", "bf16", 128, 8, 64, 4096),
        prefill_case("bf16", "bf16", 64, 4, 128, 4096),
        prefill_case("bf16", "bf16", 64, 3, 16, 4096),
        prefill_case("fp16", "fp16", 80, 1, 32, 64),
        prefill_case("bf16", "bf16", 128, 4, 16, 1),
        prefill_case("bf16", "fp8e4nv", 128, 4, 64, 4096),
        prefill_case("fp32", "fp32", 64, 3, 16, 4096),
        formed(prefill_case("bf16", "bf16", 256, 2, 64, 4096), window=512, soft_cap=50.0),  # Gemma
        formed(prefill_case("bf16", "bf16", 64, 8, 64, 4096), window=128, sinks=True),  # gpt-oss
    ]
    boxed = [False, True, True, False, False, False, False, False, False, True]
    assert [case.constants["BOXES"] for case in cases] == boxed
    for case, usage in zip(cases, compile_kernels(cases), strict=True):
        programs = 2 if case.constants["BOXES"] else 1
        # Scalars that the loop over full tiles does not need may be parked: one register of all 255 is 4 bytes.
        assert usage.spilled_bytes <= 192, case
        assert programs * usage.shared_bytes <= SHARED_BYTES, case
        assert programs * usage.registers * 32 * case.num_warps <= REGISTERS, case


@pytest.mark.slow
def test_programs_of_latent_attention_fit_on_a_multiprocessor_and_two_of_a_decode_of_few_heads() -> None:
    """DeepSeek V3, a rank of eight of it, and GLM-4.7-Flash."""
    cases = [
        latent_decode_case("bf16", "bf16", 16, 64),
        latent_decode_case("bf16", "bf16", 20, 64),
        latent_decode_case("bf16", "bf16", 128, 16),
        latent_decode_case("bf16", "fp8e4nv", 16, 64),
        latent_decode_case("bf16", "fp8e4nv", 128, 64),
        latent_prefill_case("bf16", "bf16", 16, 64, 4096),
        latent_prefill_case("bf16", "bf16", 20, 64, 1),
        latent_prefill_case("bf16", "bf16", 128, 16, 4096),
        latent_prefill_case("bf16", "fp8e4nv", 128, 64, 4096),
        *latent_joins(),
    ]
    for case, usage in zip(cases, compile_kernels(cases), strict=True):
        latents, rows = case.types.get("key_ptr", ""), case.constants.get("ROWS")
        programs = 2 if (case.kernel, latents, rows) == ("_decode_kernel", "*bf16", 16) else 1
        assert usage.spilled_bytes <= (SPILLED_OF_LATENTS[latents] if rows == 64 else 0), case
        assert programs * usage.shared_bytes <= SHARED_BYTES, case
        assert programs * usage.registers * 32 * case.num_warps <= REGISTERS, case
