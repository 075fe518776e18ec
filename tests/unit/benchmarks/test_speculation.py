"""What counts as copying, what is hostile, what is asked, and the arithmetic of the benchmark of speculation; and the
rig on the model without weights."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.speculation import cells, command, peers, requests
from benchmarks.speculation.copying import copied_share, is_copying, looped_share
from benchmarks.speculation.hostile import hostile_prompt
from benchmarks.speculation.methods import LOOKUP, OFF, FixedSpeculation, fixed_name, make_cores
from benchmarks.speculation.peers import PeerRun
from benchmarks.speculation.requests import KINDS, Request, sampling_of
from benchmarks.speculation.rig import Answer, Decoded, Rig
from benchmarks.speculation.works import Work
from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.engine.request import dummy_sequence
from disagg.engine.speculation.lookup import Lookup
from disagg.proto.messages import Sampling
from tests.support.reports import REPOSITORY

# ---------------------------------------------------------------- copying


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4], 0.5),  # 3 and 4 end trigrams of the prompt; 1 and 2 follow others
        ([1, 2, 3], [2, 3, 4], 0.0),
        ([1, 2, 3], [3, 3, 3, 3], 0.5),  # 3 3 3 is there from the second of the answer on
        ([9], [1, 2, 3, 1, 2, 3, 1], 2 / 7),
        ([9], [1], 0.0),
        ([1, 2, 3], [], 0.0),
    ],
)
def test_the_share_of_trigrams_that_the_text_before_has(prompt: list[int], answer: list[int], expected: float) -> None:
    assert copied_share(prompt, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([7, 7, 7, 7], 1.0),
        ([1, 2, 7, 7, 7, 3], 0.5),
        ([1, 2, 1, 2, 3, 4], 0.0),  # twice is no loop
        ([1, 2, 1, 2, 1, 2, 3, 4], 0.75),
        ([5, 6, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1], 10 / 12),
        ([1, 2, 3, 4], 0.0),
        ([], 0.0),
    ],
)
def test_the_share_of_an_answer_in_loops(answer: list[int], expected: float) -> None:
    assert looped_share(answer) == pytest.approx(expected)


def test_copying_is_between_shares_long_enough_and_no_loop() -> None:
    text, own = list(range(100)), list(range(1000, 1100))
    copied = [*text[:30], *own[:10]]  # 28 of 40
    assert is_copying(text, copied)
    assert not is_copying(text, copied[:31])
    assert not is_copying(text, [*text[:40], own[0]])  # 38 of 41
    assert not is_copying(text, [*text[:18], *own[:24]])
    assert not is_copying(text, [*own[:20], *[own[0]] * 30])  # 28 of 50, all of them in one loop


# ---------------------------------------------------------------- hostile texts


def longest_match(text: Sequence[int]) -> tuple[int, int]:
    """Length of the longest match of the end, 3 to 16 tokens, and the token behind the latest such match."""
    for length in range(16, 2, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if list(text[end - length : end]) == list(text[-length:]):
                return length, text[end]
    return 0, -1


def test_every_place_of_a_hostile_answer_has_a_match_with_a_wrong_continuation() -> None:
    answer = random.Random(0).sample(range(1000), 40)
    prompt = hostile_prompt(answer, vocab_size=1000, seed=1)
    matches = [longest_match([*prompt, *answer[:place]]) for place in range(3, len(answer))]
    assert [length for length, _ in matches] == ([*range(3, 11)] * 5)[: len(matches)]
    assert all(following not in answer for _, following in matches)


def test_the_engine_looks_up_a_wrong_token_at_every_place_of_a_hostile_answer() -> None:
    answer = random.Random(0).sample(range(1000), 40)
    prompt = hostile_prompt(answer, vocab_size=1000, seed=1)
    sequence, lookup = dummy_sequence(1, 0, 16), Lookup()
    sequence.token_ids[:] = [*prompt, *answer[:2]]
    for token_id in answer[2:-1]:
        sequence.token_ids.append(token_id)
        proposal = lookup.propose(sequence, 8)
        assert proposal.token_ids[0] not in answer


def test_a_hostile_prompt_needs_a_token_that_is_not_in_the_answer() -> None:
    with pytest.raises(ValueError, match="no token is left"):
        hostile_prompt([0, 1, 2, 3], vocab_size=4, seed=1)


# ---------------------------------------------------------------- requests


def test_paragraphs_are_prose_of_some_length_without_links() -> None:
    prose = "Words of a text that [names](a.md) other ones. " * 6
    assert requests.paragraphs(f"# Title\n\nshort\n\n{prose}\n\n| {'x' * 300} |\n\n- {prose}\n") == [
        ("Words of a text that names other ones. " * 6).strip()
    ]


def test_functions_of_a_module() -> None:
    body = "\n".join(f"        value_{number} = {number}" for number in range(15))
    source = f"import os\n\ndef short():\n    pass\n\nclass C:\n    def method(self):\n{body}\n"
    (found,) = requests.functions(source)
    assert found.startswith("def method(self):\n    value_0 = 0")
    name, question = next(requests.code_questions(found))
    assert name == "rename"
    assert question.startswith("Rename the function `method` to `method_of`")
    assert question.endswith(f"```python\n{found}\n```")


def test_rows_of_tables_as_json() -> None:
    table = "| name | meaning |\n|---|---|\n" + "".join(f"| `n{n}` | {'word ' * 20} |\n" for n in range(4))
    texts = requests.records(f"before\n\n{table}\nafter\n")
    assert [[entry["name"] for entry in json.loads(text)] for text in texts] == [["n0", "n1", "n2"]]


def test_questions_of_the_repository_come_in_turn_and_are_all_different() -> None:
    questions = requests.copying_questions(REPOSITORY)
    assert {name for name, _ in questions[:6]} >= {"quotes", "rename", "indent"}
    assert {name for name, _ in questions} == {"quotes", "repeat", "replace", "rename", "comment", "indent", "lines"}
    assert len(set(questions)) == len(questions) > 100
    assert requests.in_turn([[("a", "1"), ("a", "2")], [("b", "1")]]) == [("a", "1"), ("b", "1"), ("a", "2")]
    assert len(set(requests.chat_questions())) == len(requests.chat_questions()) == 64


@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_choose_tokens(kind: str) -> None:
    sampling = sampling_of(KINDS[kind], seed=3, max_tokens=9, ends=[2])
    assert (sampling.seed, sampling.max_tokens, sampling.stop_token_ids) == (3, 9, (2,))
    assert bool(sampling.grammar) == ("grammar" in kind)
    assert sampling != sampling_of(KINDS["greedy"], seed=3, max_tokens=9, ends=[2]) or kind == "greedy"


# ---------------------------------------------------------------- the arithmetic


def row(
    method: str, turn: int, tok_s: float, *, work: str = "copying", batch: int = 1, **figures: Any
) -> dict[str, Any]:
    return {
        "work": work, "batch": batch, "method": method, "turn": turn, "tok_s": tok_s, "itl_p99_ms": 10.0,
        "answers": 4, "differing": 0, **figures,
    }  # fmt: skip


def test_ratios_are_those_of_each_turn() -> None:
    rows = [
        row(OFF, 0, 100.0), row(LOOKUP, 0, 200.0), row(fixed_name(2), 0, 250.0), row(fixed_name(4), 0, 90.0),
        row(OFF, 1, 50.0), row(LOOKUP, 1, 150.0), row(fixed_name(2), 1, 150.0), row(fixed_name(4), 1, 90.0),
        row(OFF, 0, 100.0, work="chat"), row(LOOKUP, 0, 98.0, work="chat", itl_p99_ms=11.0),
        row(OFF, 0, 100.0, work="chat", batch=4), row(LOOKUP, 0, 101.0, work="chat", batch=4, differing=1),
        row(OFF, 0, 10.0, work="hostile"), row(LOOKUP, 0, 9.9, work="hostile"),
        row(OFF, 0, 10.0, work="kind: drawn", batch=8), row(LOOKUP, 0, 9.9, work="kind: drawn", batch=8, differing=2),
    ]  # fmt: skip
    found = cells.summarize(rows)
    assert found == {
        "copying_b1": 2.5,
        "copying_b4": None,
        "copying_b8": None,
        "chat_b1": 0.98,
        "chat_b4": 1.01,
        "hostile_b1": 0.99,
        "chat_min": 0.98,
        "hostile": 0.99,
        "differing_answers": 3.0,
        "compared_answers": 40.0,
        "of_best_fixed_k_min": 0.9,  # of 200 / 250 and 150 / 150
        "itl_p99_copying": 1.0,
        "itl_p99_chat": 1.1,
        "itl_p99_hostile": 1.0,
    }


def test_no_drafts_may_be_the_best_fixed_number() -> None:
    rows = [row(OFF, 0, 100.0), row(LOOKUP, 0, 96.0), row(fixed_name(2), 0, 60.0)]
    assert cells.best_fixed(rows, ("copying", 1)) == OFF
    assert cells.best_fixed(rows[:2], ("copying", 1)) is None
    assert cells.summarize(rows)["of_best_fixed_k_min"] == 0.96


def test_a_plain_run_alone_has_no_ratios() -> None:
    found = cells.summarize([row(OFF, 0, 100.0)])
    assert {name for name, value in found.items() if value is not None} == {"differing_answers", "compared_answers"}


def test_answers_are_compared_by_their_tokens_and_turns_change_the_order() -> None:
    one, other, later = Answer(token_ids=[1, 2]), Answer(token_ids=[1, 3]), Answer(token_ids=[1, 2], last_ms=5.0)
    assert cells.num_differing([one, one], [later, other]) == 1
    assert [list(cells.in_order("abc", turn)) for turn in (0, 1, 2)] == [list("abc"), list("cba"), list("abc")]


def test_a_row_counts_what_steps_gave() -> None:
    answers = (Answer(token_ids=[1, 2, 3], gaps_ms=[4.0, 6.0]), Answer(token_ids=[1, 2], gaps_ms=[5.0]))
    decoded = Decoded(answers=answers, elapsed_s=0.01, num_steps=2, num_rows=4)
    found = cells.row_of("chat", 2, OFF, 0, decoded, decoded)
    assert (found["tokens"], found["tok_s"], found["itl_p50_ms"], found["differing"]) == (3, 300.0, 5.0, 0)


def test_small_sizes_and_the_methods_of_a_command_line() -> None:
    options = command.parse_arguments(["--quick"])
    assert (options.batches, options.turns, options.max_tokens) == ([1, 4], 1, 48)
    assert options.fixed == [2]


# ---------------------------------------------------------------- peers


LLAMA_LOG = """
0.01.959.395 I encoded   12 tokens in    0.010 seconds, speed: 1200.000 t/s
0.01.959.419 I decoded    5 tokens in    0.250 seconds, speed:   20.000 t/s

0.01.959.445 I n_draft      = 8
"""


def test_figures_of_llama_cpp() -> None:
    prompt = "<|im_start|>user\nSay it.<|im_end|>\n<|im_start|>assistant\n"
    assert peers.parse_llama(f"\n\n{prompt}So it is.\n\n", LLAMA_LOG, prompt, 12) == ("So it is.", 5, 0.25)
    with pytest.raises(RuntimeError, match="made 12 tokens of a prompt of 13"):
        peers.parse_llama("", LLAMA_LOG, prompt, 13)
    with pytest.raises(RuntimeError, match="no figures: error: no model"):
        peers.parse_llama("", "error: no model", prompt, 12)


def test_a_longer_answer_is_no_other_one() -> None:
    assert [peers.differ(*pair) for pair in (("ab", "ab"), ("ab", "abc"), ("abc", "ab"), ("abc", "abd"))] == [
        False, False, False, True,
    ]  # fmt: skip


class OnePeer:
    """Twice as fast with speculation at one sequence, and with one other answer."""

    name = "one"
    batches = (1, 8)

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def run(self, requests: Sequence[Request], batch: int, *, speculates: bool) -> PeerRun:
        self.asked.append((batch, speculates))
        texts = tuple(f"{request.name} {speculates and request.name == '0'}" for request in requests)
        return PeerRun(num_tokens=10, seconds=0.5 if speculates and batch == 1 else 1.0, texts=texts)


def test_peers_run_with_and_without_speculation_in_turn() -> None:
    peer = OnePeer()
    rows = list(peers.measure(peer, made(3, num_tokens=4), [1, 4, 8], turns=2))
    assert peer.asked == [(batch, with_drafts) for batch in (1, 8) for with_drafts in (False, True, True, False)]
    assert [(row["plain_tok_s"], row["speculation_tok_s"], row["differing"]) for row in rows] == [
        (10.0, 20.0, 1), (10.0, 20.0, 1), (10.0, 10.0, 1), (10.0, 10.0, 1),
    ]  # fmt: skip
    assert peers.summarize(rows) == {"one_copying_b1": 2.0, "one_copying_b8": 1.0}


# ---------------------------------------------------------------- fixed numbers of drafts


def test_as_many_drafts_as_fixed_where_there_is_room() -> None:
    speculation = FixedSpeculation(3)
    looping, other = dummy_sequence(12, 0, 16), dummy_sequence(12, 1, 16)
    other.token_ids[:] = range(12)

    def drafts(*mosts: int, num_free: int = 9) -> list[tuple[int, ...]]:
        sequences = list(zip((looping, other, looping), mosts, strict=True))
        return speculation.plan(sequences, num_rows=3, context=36, most_rows=3 + num_free, most_ms=0.0)

    assert drafts(8, 8, 8) == [(0, 0, 0), (), (0, 0, 0)]
    assert drafts(2, 8, 0) == [(0, 0), (), ()]
    assert drafts(8, 8, 8, num_free=4) == [(0, 0, 0), (), (0,)]


# ---------------------------------------------------------------- the rig


CONFIG = WorkerConfig(worker_id="b", roles=("prefill", "decode"), model_path="fake", num_blocks=64, max_model_len=256)


def made(count: int, num_tokens: int) -> list[Request]:
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens)
    return [
        Request(name=str(number), prompt=tuple(range(number, number + 20)), sampling=sampling)
        for number in range(count)
    ]


def test_the_rig_decodes_every_request() -> None:
    rig = Rig(CONFIG)
    core = make_cores(rig.runner, CONFIG, rig.calibration, ())[OFF]
    asked = made(7, num_tokens=6)
    for batch in (1, 3, 9, 1):  # a core may be used again
        decoded = rig.run(core, rig.prefill(asked), batch)
        expected = [fake_generate(list(request.prompt), 6) for request in asked]
        assert [answer.token_ids for answer in decoded.answers] == expected
        assert [len(answer.gaps_ms) for answer in decoded.answers] == [5] * 7
        assert (decoded.num_tokens, decoded.num_rows) == (35, 35)
    assert core.is_idle
    assert core.check_integrity() == []


def test_answers_of_one_token_are_left_out() -> None:
    assert Rig(CONFIG).prefill(made(3, num_tokens=1)) == []


def test_the_rig_refuses_what_the_engine_has_no_room_for() -> None:
    rig = Rig(CONFIG)
    core = make_cores(rig.runner, CONFIG, rig.calibration, ())[OFF]
    long = Request(name="long", prompt=tuple(range(250)), sampling=Sampling(temperature=0.0, max_tokens=5))
    with pytest.raises(RuntimeError, match="the engine does not take long"):
        rig.run(core, rig.prefill([long] * 5), 5)


def test_all_methods_give_the_same_tokens() -> None:
    rig = Rig(CONFIG)
    cores = make_cores(rig.runner, CONFIG, rig.calibration, [2, 8])
    sampling = Sampling(temperature=0.0, max_tokens=12)
    loops = [Request(name=str(n), prompt=(n, 1, 2, 3) * 6, sampling=sampling) for n in range(4)]
    work = Work(name="copying", prefilled=tuple(rig.prefill(loops)))
    options = command.parse_arguments(["--quick"])
    rows = list(command.measure_work(rig, cores, work, options))
    assert [(row["batch"], row["method"]) for row in rows] == [
        (batch, method) for batch in (1, 4) for method in (OFF, LOOKUP, "fixed 2", "fixed 8")
    ]
    assert {(row["tokens"], row["differing"]) for row in rows if row["batch"] == 1} == {(44, 0)}
    assert cells.summarize(rows)["compared_answers"] == 3 * (4 + 8)


def test_drafts_that_change_a_token_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(CONFIG)
    cores = make_cores(rig.runner, CONFIG, rig.calibration, [])
    prefilled = rig.prefill(made(3, num_tokens=6))
    work = Work(name="drawn", prefilled=tuple(prefilled))
    monkeypatch.setattr(
        rig, "run", lambda core, some, batch: altered(Rig.run(rig, core, some, batch), core is cores[LOOKUP])
    )
    rows = list(command.measure_kind(rig, cores, work))
    assert [(row["work"], row["method"], row["differing"]) for row in rows] == [
        ("kind: drawn", OFF, 0), ("kind: drawn", LOOKUP, 1),
    ]  # fmt: skip


def altered(decoded: Decoded, is_wrong: bool) -> Decoded:
    if is_wrong:
        decoded.answers[1].token_ids[3] += 1
    return decoded
