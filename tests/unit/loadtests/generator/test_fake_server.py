"""What the fake server is to do, exactly."""

from __future__ import annotations

import pytest

from disagg.loadtests.generator.fake_server import FAKE_VOCAB_SIZE, FakeTiming, fake_answer, parse_arguments


def test_without_a_spread_every_request_has_the_same_latencies() -> None:
    timing = FakeTiming(ttft_s=0.1, tpot_s=0.02)
    assert timing.of([1, 2, 3]) == timing.of([]) == (0.1, 0.02)


def test_a_spread_scales_both_latencies_by_one_factor_of_the_prompt() -> None:
    timing = FakeTiming(ttft_s=0.1, tpot_s=0.02, spread=0.5)
    ttfts = []
    for first in range(200):
        ttft_s, tpot_s = timing.of([first])
        assert ttft_s / 0.1 == pytest.approx(tpot_s / 0.02)
        assert (ttft_s, tpot_s) == timing.of([first])
        ttfts.append(ttft_s)
    assert 0.05 <= min(ttfts) < 0.06
    assert 0.14 < max(ttfts) <= 0.15


def test_what_falls_into_the_stall_comes_at_its_end() -> None:
    timing = FakeTiming(stall_at_s=2.0, stall_s=0.5)
    assert [timing.release_s(time_s) for time_s in (1.999, 2.0, 2.25, 2.5, 3.0)] == [1.999, 2.5, 2.5, 2.5, 3.0]
    assert FakeTiming().release_s(0.0) == 0.0


def test_every_so_many_requests_are_refused_or_end_halfway() -> None:
    timing = FakeTiming(refuse_every=3, fail_every=4)
    assert [number for number in range(1, 13) if timing.is_refused(number)] == [3, 6, 9, 12]
    assert [number for number in range(1, 13) if timing.is_failed(number)] == [4, 8, 12]
    assert not FakeTiming().is_refused(1)
    assert not FakeTiming().is_failed(1)


def test_answers_differ_between_prompts_and_not_between_times() -> None:
    answer = fake_answer([5, 6, 7], 4)
    assert answer == fake_answer([5, 6, 7], 9)[:4]
    assert answer != fake_answer([5, 6, 8], 4)
    assert all(0 <= token_id < FAKE_VOCAB_SIZE for token_id in answer)


def test_the_command_line_is_in_milliseconds() -> None:
    timing, port, core, nice = parse_arguments(["--port", "9", "--ttft-ms", "40", "--tpot-ms", "8", "--core", "1"])
    assert (timing, port, core, nice) == (FakeTiming(ttft_s=0.04, tpot_s=0.008), 9, 1, None)


def test_a_setting_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--refuse-every", "0"])
    assert "refuse_every" in capsys.readouterr().err
