"""A batch survives the way to the other ranks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from disagg.engine.batch_arrays import BatchArrays, BatchBuilder
from disagg.engine.plan import StepPlan
from disagg.engine.rank_messages import RankCommand, Step, decode_step, encode_step
from disagg.proto.messages import MAX_FRAME_BYTES
from tests.support.stepping import chunk, last_token, make_sequence

LONG, SHORT = make_sequence(list(range(30, 40)), [8, 6, 4]), make_sequence([50, 51, 52], [7])
FILLING = make_sequence(list(range(100, 107)), [3, 9])
PLANS = {
    "mixed": StepPlan((last_token(LONG), last_token(SHORT)), (chunk(FILLING, 2, 6), chunk(SHORT, 0, 3))),
    "decodes": StepPlan(decodes=(last_token(SHORT), last_token(LONG))),
    "prefills": StepPlan(prefills=(chunk(FILLING, 0, 7),)),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_arrives_is_what_was_sent(name: str) -> None:
    arrays = BatchBuilder(4, max_model_len=40).arrays(PLANS[name])
    frame = msgspec.msgpack.encode(encode_step(arrays))
    step = msgspec.msgpack.decode(frame, type=RankCommand)
    assert isinstance(step, Step)
    assert_equal(decode_step(step), arrays)


def assert_equal(found: BatchArrays, sent: BatchArrays) -> None:
    for field in ("token_ids_T", "positions_T", "slot_mapping_T", "block_tables_SM", "context_lens_S", "sample_rows"):
        one, other = getattr(found, field), getattr(sent, field)
        if other is None:
            assert one is None
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.flags.writeable  # torch shares the memory and wants it so
        np.testing.assert_array_equal(one, other)
    assert found.num_decodes == sent.num_decodes
    assert (found.wants_logits, found.wants_rows) == (sent.wants_logits, sent.wants_rows)
    for chunk_found, chunk_sent in zip(found.prefills, sent.prefills, strict=True):
        assert (chunk_found.num_tokens, chunk_found.start) == (chunk_sent.num_tokens, chunk_sent.start)
        np.testing.assert_array_equal(chunk_found.block_table_M, chunk_sent.block_table_M)


def test_torn_arrays_are_refused() -> None:
    step = encode_step(BatchBuilder(4, max_model_len=40).arrays(PLANS["mixed"]))
    with pytest.raises(ValueError, match="buffer size must be a multiple"):
        decode_step(msgspec.structs.replace(step, positions=step.positions[:-1]))
    with pytest.raises(ValueError, match="the tables have 3 blocks, and their rows 4"):
        decode_step(msgspec.structs.replace(step, decode_tables=step.decode_tables[:-4]))


def test_one_long_sequence_among_many_short_ones_is_no_frame_that_a_line_refuses() -> None:
    """Tables are as wide as the widest; what is sent is what they hold. A connection that refuses ends the worker."""
    long = make_sequence([1] * 32_768, list(range(2048)))
    others = [make_sequence([2, 3], [9]) for _ in range(2600)]
    arrays = BatchBuilder(16, max_model_len=32_768).arrays(StepPlan(tuple(map(last_token, [*others, long]))))
    assert arrays.block_tables_SM.nbytes > MAX_FRAME_BYTES
    frame = msgspec.msgpack.encode(encode_step(arrays))
    assert len(frame) < 128 << 10
    assert_equal(decode_step(msgspec.msgpack.decode(frame, type=Step)), arrays)


def test_blocks_0_are_kept_wherever_they_are() -> None:
    made = [make_sequence([1] * 12, table) for table in ([0, 3, 0], [0, 0, 0], [5, 0, 7])]
    arrays = BatchBuilder(4, max_model_len=40).arrays(StepPlan(tuple(map(last_token, made))))
    assert arrays.block_tables_SM.tolist() == [[0, 3, 0], [0, 0, 0], [5, 0, 7]]
    assert_equal(decode_step(encode_step(arrays)), arrays)
