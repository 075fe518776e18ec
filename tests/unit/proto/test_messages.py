"""Messages survive the wire unchanged, and everything that is not a message of the conversation is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.proto import handover as h
from disagg.proto import messages as m
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.token_ids import pack_token_ids

R = RequestId("r1")
SPEC = m.SequenceSpec(
    request_id=R,
    attempt=2,
    gateway_id=GatewayId("g"),
    prompt_token_ids=pack_token_ids((1, 2, 3)),
    emitted_token_ids=(4, 5),
    block_hashes=(BlockHash(bytes(range(16))),),
    root_hash=BlockHash(b"\xff" * 16),
    sampling=m.Sampling(temperature=0.7, seed=2**64 - 1, stop_token_ids=(0, 2)),
    timeout_s=1.5,
    targets=m.Targets(ttft_s=2.0, age_s=0.25, output_tokens=64.0),
)
LAYOUT = m.KvLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", bytes_per_token=64)
INFO = m.WorkerInfo(
    worker_id=WorkerId("prefill-0"),
    incarnation=Incarnation("i1"),
    roles=("prefill", "decode"),
    address="127.0.0.1:1",
    pid=7,
    fingerprint="f",
    kv_layout=LAYOUT,
    num_blocks=10,
    block_size=16,
    max_num_seqs=4,
    token_budget=64,
    max_model_len=128,
)
PEER = m.PeerRef(worker_id=WorkerId("decode-0"), incarnation=Incarnation("i2"), address="127.0.0.1:2")
IDS = {"request_id": R, "attempt": 2}
OPERATION: dict[str, Any] = {**IDS, "generation": 9}

CONVERSATIONS: dict[str, tuple[Any, list[msgspec.Struct]]] = {
    "GatewayToWorker": (
        m.GatewayToWorker,
        [
            m.Dispatch(spec=SPEC, decode_peer=PEER),
            m.Dispatch(spec=SPEC),
            m.Dispatch(spec=SPEC, fetch=m.FetchFrom(peer=PEER, end_token=256, timeout_ms=50.0)),
            m.Connect(decode_peer=PEER),
            m.Cancel(request_id=R, attempt=2),
            m.Migrate(request_id=R, attempt=2, number=1, decode_peer=PEER, pair_timeout_s=2.0),
            m.CancelMigration(request_id=R, attempt=2),
            m.ForgetTenant(tenant_tag=b"t"),
        ],
    ),
    "WorkerToGateway": (
        m.WorkerToGateway,
        [
            m.SessionHello(info=INFO),
            m.StepUpdate(),
            m.StepUpdate(
                tokens=(m.TokenOut(R, 2, 7, (11, 12)),),
                prefilled=(m.PrefillDone(request_id=R, attempt=2, cached_tokens=16),),
                handed_over=(m.HandedOver(request_id=R, attempt=2, kv_bytes=2**40, cached_tokens=0, transport="gloo"),),
                ends=(m.End(request_id=R, attempt=2, reason="refused", detail="no room"),),
                migrations_failed=(m.MigrationFailed(request_id=R, attempt=2, refused=True, detail="no room"),),
                fetched=(
                    m.Fetched(request_id=R, attempt=2, source=WorkerId("decode-0"), outcome="done", tokens=128),
                    m.Fetched(request_id=R, attempt=3, source=WorkerId("decode-0"), outcome="late", detail="0.5 s"),
                ),
            ),
        ],
    ),
    "WorkerReport": (
        m.WorkerReport,
        [
            m.WorkerReport(
                worker_id=WorkerId("w"),
                incarnation=Incarnation("i"),
                sequence=3,
                load=m.Load(num_running=1, steps=8),
                kv_events=(
                    m.BlocksSnapshot(hashes=()),
                    m.BlocksStored(hashes=(BlockHash(b"a" * 16),)),
                    m.BlocksRemoved(hashes=(BlockHash(b"b" * 16), BlockHash(b"\x80" * 16))),
                ),
            )
        ],
    ),
    "AuditReport": (
        m.AuditReport,
        [m.AuditReport(worker_id=WorkerId("w"), incarnation=Incarnation("i"), counts={"leases": 0}, problems=("x",))],
    ),
    "SenderToReceiver": (
        h.SenderToReceiver,
        [
            h.PairHello(info=INFO, receiver_incarnation=Incarnation("i2")),
            h.Offer(spec=SPEC),
            h.Offer(spec=SPEC, move=2),
            h.Extend(**OPERATION, token_ids=(5, 6)),
            h.ChunkHeader(**OPERATION, seq=0, start_token=16, end_token=64, nbytes=3072, checksum=2**64 - 1),
            h.ChunkHeader(**OPERATION, seq=0, start_token=16, end_token=64, nbytes=3072, checksum=None),
            h.ChunkSum(**OPERATION, seq=0, checksum=2**64 - 1),
            h.Commit(**OPERATION, token_id=5, num_chunks=1),
            h.Abort(request_id=R, attempt=2, failure=h.Failure.CANCELLED, detail="cancelled"),
            h.AbortAck(request_id=R, attempt=2),
            h.PairHeartbeat(),
        ],
    ),
    "ReceiverToSender": (
        h.ReceiverToSender,
        [
            h.PairWelcome(
                incarnation=Incarnation("i2"), pair_name="p", transport="gloo", credits=4, max_chunk_bytes=1 << 22
            ),
            h.PairRefused(reason="fingerprint"),
            h.Reserved(**OPERATION, cached_tokens=16),
            h.Refused(request_id=R, attempt=2, reason="no room"),
            h.ClearToSend(**OPERATION, seq=0, turn=0),
            h.ChunkDone(**OPERATION, seq=0, ok=False),
            h.CommitAck(**OPERATION),
            h.Abort(request_id=R, attempt=2, failure=h.Failure.LEASE_LOST),
            h.AbortAck(request_id=R, attempt=2),
            h.PairHeartbeat(),
            h.CloseWhenIdle(),
        ],
    ),
}


def test_targets_grow_old() -> None:
    before = m.Targets(ttft_s=2.0, tpot_s=0.02, age_s=0.25, output_tokens=64.0)
    assert before.after(0.5) == m.Targets(ttft_s=2.0, tpot_s=0.02, age_s=0.75, output_tokens=64.0)
    assert m.Targets(age_s=3.0, streamed_s=1.0).after(0.5) == m.Targets(age_s=3.5, streamed_s=1.5)


GATEWAY_TO_WORKER = CONVERSATIONS["GatewayToWorker"][0]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_round_trip(name: str) -> None:
    kind, examples = CONVERSATIONS[name]
    decoder = m.decoder(kind)
    for example in examples:
        decoded = decoder.decode(m.encode(example))
        assert decoded == example
        assert type(decoded) is type(example)


@pytest.mark.parametrize("name", ["GatewayToWorker", "WorkerToGateway", "SenderToReceiver", "ReceiverToSender"])
def test_the_examples_cover_the_union(name: str) -> None:
    kind, examples = CONVERSATIONS[name]
    assert {type(example) for example in examples} == set(kind.__args__)


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("GatewayToWorker", m.StepUpdate()),
        ("WorkerToGateway", m.Cancel(request_id=R, attempt=0)),
        ("SenderToReceiver", h.Reserved(**OPERATION, cached_tokens=0)),
        ("ReceiverToSender", h.Offer(spec=SPEC)),
    ],
)
def test_a_message_of_another_conversation_is_refused(name: str, foreign: msgspec.Struct) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decoder(CONVERSATIONS[name][0]).decode(m.encode(foreign))


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "Cancel", "request_id": "r", "attempt": 0, "surplus": 1},
        {"type": "Cancel", "request_id": "r"},
        {"type": "Cancel", "request_id": "r", "attempt": "0"},
        {"type": "Explode"},
        {"request_id": "r", "attempt": 0},
        [],
        None,
    ],
)
def test_a_malformed_message_is_refused(frame: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decoder(GATEWAY_TO_WORKER).decode(msgspec.msgpack.encode(frame))


def test_a_frame_that_is_cut_off_is_refused() -> None:
    frame = m.encode(m.Dispatch(spec=SPEC))
    decoder = m.decoder(GATEWAY_TO_WORKER)
    for length in range(len(frame)):
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(frame[:length])


@pytest.mark.parametrize("message", [m.Dispatch(spec=SPEC), h.Offer(spec=SPEC)])
@pytest.mark.parametrize(
    ("prompt", "refusal"),
    [
        (b"1", r"prompt_token_ids has 1 bytes, which is no multiple of 4 - at `\$.spec`"),
        (b"11 bytes...", r"prompt_token_ids has 11 bytes, which is no multiple of 4 - at `\$.spec`"),
        ([1, 2, 3], r"Expected `bytes`, got `array` - at `\$.spec.prompt_token_ids`"),
    ],
)
def test_a_prompt_that_is_not_packed_is_refused_by_name(
    message: m.Dispatch | h.Offer, prompt: object, refusal: str
) -> None:
    frame = msgspec.msgpack.decode(m.encode(message))
    frame["spec"]["prompt_token_ids"] = prompt
    with pytest.raises(msgspec.ValidationError, match=f"^{refusal}$"):
        m.decoder(m.Dispatch | h.Offer).decode(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize(
    "wrong",
    [{"end_token": 0}, {"end_token": 100}, {"end_token": -128}, {"timeout_ms": 0.0}, {"timeout_ms": float("nan")}],
)
def test_a_fetch_of_no_whole_extents_or_without_time_is_refused(wrong: dict[str, object]) -> None:
    fetch = m.FetchFrom(peer=PEER, end_token=256, timeout_ms=50.0)
    frame = msgspec.msgpack.decode(m.encode(m.Dispatch(spec=SPEC, fetch=fetch)))
    frame["fetch"] |= wrong
    with pytest.raises(msgspec.ValidationError, match=rf"at `\$.fetch.{next(iter(wrong))}`"):
        m.decoder(GATEWAY_TO_WORKER).decode(msgspec.msgpack.encode(frame))


def test_an_unknown_end_is_refused() -> None:
    good = msgspec.msgpack.decode(m.encode(m.End(request_id=R, attempt=0, reason="stop")))
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'exploded'"):
        m.decoder(m.End).decode(msgspec.msgpack.encode(good | {"reason": "exploded"}))


@pytest.mark.parametrize("field", ["attempt", "sampling", "surplus"])
def test_messages_cannot_be_changed(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(SPEC, field, 3)


def test_the_key_and_the_length_of_a_sequence() -> None:
    assert SPEC.key == AttemptKey(R, 2)
    assert str(SPEC.key) == "r1/2"
    assert SPEC.num_known_tokens == 5


def test_tokens_of_a_step_are_compact() -> None:
    """One message per step for a whole batch: a token costs its id, its index and its request, and no field names."""
    tokens = tuple(m.TokenOut(RequestId(f"{i:016d}"), 0, 100, (42,)) for i in range(256))
    assert len(m.encode(m.StepUpdate(tokens=tokens))) <= 256 * 24


@pytest.mark.parametrize("kind", [m.BlocksStored, m.BlocksRemoved, m.BlocksSnapshot])
def test_a_block_without_a_hash_is_refused(kind: type[m.BlocksStored | m.BlocksRemoved | m.BlocksSnapshot]) -> None:
    frame = m.encode(kind(hashes=(BlockHash(b"a"), BlockHash(b""))))
    with pytest.raises(msgspec.ValidationError, match="length >= 1"):
        m.decoder(kind).decode(frame)


def test_a_failure_that_is_not_known_here_is_another_one() -> None:
    frame = m.encode(h.Abort(request_id=R, attempt=2, failure=h.Failure.STUCK))
    changed = msgspec.msgpack.encode({**msgspec.msgpack.decode(frame), "failure": "of a later version"})
    message = m.decoder(h.ReceiverToSender).decode(changed)
    assert message == h.Abort(request_id=R, attempt=2, failure=h.Failure.OTHER)


def test_failures_are_the_reasons_of_a_metric() -> None:
    """Dashboards name them."""
    assert {failure.value for failure in h.Failure} >= {
        "lease_lost",
        "pair_lost",
        "pair_closed",
        "transport",
        "stuck",
        "chunk_rejected",
        "kv_gone",
        "violation",
        "other",
    }
