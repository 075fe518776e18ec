"""The arithmetic of the faults benchmark: what counts as whole, as wrong, as a gap."""

from __future__ import annotations

import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.engine.fake_runner import fake_generate
from tests.acceptance.faults.load import Model, Stream
from tests.acceptance.faults.overload import TTFT_MS, WINDOW_S, is_good, rate
from tests.acceptance.faults.promises import GROUPS, summary
from tests.acceptance.faults.row import Row, all_right, of_streams

EXPECTED = (5, 6, 7)


def stream(*token_ids: int, times: tuple[float, ...] = (), error: str = "") -> Stream:
    return Stream(1.0, EXPECTED, list(times), list(token_ids), error, 9.0)


@pytest.mark.parametrize(
    ("it", "is_whole", "is_wrong"),
    [
        (stream(5, 6, 7), True, False),
        (stream(5, 6, 8), True, True),
        (stream(5, 6), False, False),
        (stream(5, 6, error="lost"), False, False),
        (stream(5, 7), False, True),  # one is missing
        (stream(5, 5), False, True),  # one came twice
        (stream(5, 6, 7, 8), False, True),
        (stream(), False, False),
    ],
)
def test_what_is_whole_and_what_is_wrong(it: Stream, is_whole: bool, is_wrong: bool) -> None:
    assert (it.is_whole, it.is_wrong) == (is_whole, is_wrong)


def test_gaps_and_first_tokens() -> None:
    assert stream(5, 6, 7, times=(1.5, 2.0, 4.5)).longest_gap_s == 2.5
    assert stream(5, 6, 7, times=(1.5, 2.0, 4.5)).ttft_s == 0.5
    assert (stream().longest_gap_s, stream().ttft_s) == (0.0, 8.0)


def test_a_row_s_figures() -> None:
    streams = [stream(5, 6, 7, times=(2.0, 3.0)), stream(5, times=(1.25,), error="lost"), stream(9, times=(1.5,))]
    seen = of_streams(streams)
    assert seen == {
        "streams": 3,
        "completed": 1,
        "failed": 1,
        "wrong": 1,
        "longest_gap_s": 1.0,
        "longest_ttft_s": 1.0,
        "errors": ("lost",),
    }
    assert not all_right(seen)
    assert all_right(of_streams(streams[:1]))
    assert not all_right(of_streams([]))


def test_the_summary_counts_rows_and_has_each_row_s_figures() -> None:
    rows = [
        Row(
            name="a",
            promise="",
            met=True,
            streams=2,
            completed=2,
            figures={"detected_s": 2.50049},
            loop_longest_s=0.0071,
        ),
        Row(name="b", promise="", met=False, loop_longest_s=0.0609518),
    ]
    flat = summary(rows)
    assert (flat["rows_met"], flat["rows_total"], flat["a_streams"], flat["a_detected_s"]) == (1, 2, 2, 2.5)
    assert flat["b_completed"] == 0
    assert flat["loop_longest_ms"] == 60.952
    assert summary([])["loop_longest_ms"] == 0.0


def test_prompts_have_no_common_start_and_known_answers() -> None:
    pairs = Model().pairs(8)
    assert len({prompt[:2] for prompt, _ in pairs}) == len(pairs)
    assert all(list(answer) == fake_generate(prompt, 8) for prompt, answer in pairs)


def test_every_row_has_one_name_and_every_configuration_can_be_used() -> None:
    names = [name for group in GROUPS for name in group.rows]
    assert len(set(names)) == len(names)
    for group in GROUPS:
        parse_config(group.config(Model()))


def test_an_answer_counts_for_as_much_of_it_as_came_in_the_window() -> None:
    whole, half, outside = ([begin + 0.5 * i for i in range(10)] for begin in (12.0, 7.5, 100.0))
    answers = [Stream(9.0, (), times, counts=[1] * 10) for times in (whole, half, outside)]
    assert [answer.tokens_in(10.0, 10.0 + WINDOW_S) for answer in answers] == [10, 5, 0]
    assert rate(answers, 10.0, 10) * WINDOW_S == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("late_s", "is_whole", "counts"), [(0.0, True, True), (0.01, True, False), (0.0, False, False)]
)
def test_an_answer_is_good_that_is_whole_and_began_in_time(late_s: float, is_whole: bool, counts: bool) -> None:
    assert is_good(Stream(0.0, (7,) if is_whole else (7, 8), [TTFT_MS / 1000 + late_s], [7])) is counts
