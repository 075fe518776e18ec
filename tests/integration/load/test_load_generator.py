"""Locust with our locustfile against the fake server: what is sent, recorded and reported, whatever the machine's pace.

Nothing here asserts how long anything took, but for stalls, which the server makes long on purpose.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from disagg.cluster.system.children import LaunchError
from disagg.loadtests.generator.fake_server import FAKE_VOCAB_SIZE, FakeTiming, fake_answer
from disagg.loadtests.generator.gateway_client import digest
from disagg.loadtests.generator.load_generator import GeneratorOptions, locust_command, locust_environment, play
from disagg.loadtests.generator.recorder import read_info
from disagg.loadtests.records import PlannedRequest, RequestRecord, read_file
from disagg.loadtests.scenario import Scenario
from disagg.loadtests.verdict.goodput import Slo, evaluate
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import MultiTurnWorkload, RandomWorkload, plan_requests
from disagg.proto.errors import ConfigError
from tests.support.fake_server import fake_server
from tests.support.ports import free_port

QUICK = FakeTiming(ttft_s=0.02, tpot_s=0.002)
PLAIN = GeneratorOptions(nice=0)
TIMEOUT_S = 60.0
KEY = "a-key-of-nobody-0001"


def random_scenario(num_requests: int, *, rate_per_s: float = 60.0, osl: int = 8) -> Scenario:
    return Scenario(
        workload=RandomWorkload(isl=(4, 20), osl=osl, seed=1),
        arrivals=ArrivalConfig(rate_per_s=rate_per_s, num_requests=num_requests, seed=2),
    )


def planned(scenario: Scenario) -> list[PlannedRequest]:
    return plan_requests(scenario.workload, scenario.arrivals, vocab_size=FAKE_VOCAB_SIZE, max_model_len=1 << 20)


def played(
    scenario: Scenario, timing: FakeTiming, folder: Path, options: GeneratorOptions = PLAIN, slo: Slo | None = None
) -> list[RequestRecord]:
    """The records of one run against a fake server, by index."""
    record = folder / "run.jsonl"
    with fake_server(timing) as server:
        info = play(scenario, server.address, record, options, slo=slo, label="test")
    assert (info.target, info.model, info.label) == (server.address, "fake-server", "test")
    assert info.is_complete
    return sorted(read_file(record), key=lambda found: found.index)


def test_every_request_that_was_due_has_one_record_that_says_what_became_of_it(tmp_path: Path) -> None:
    scenario = random_scenario(60)
    records = played(scenario, FakeTiming(ttft_s=0.02, tpot_s=0.002, refuse_every=10, fail_every=7), tmp_path)
    plan = planned(scenario)
    assert [(record.index, record.due_s) for record in records] == [(request.index, request.due_s) for request in plan]
    by_status = {status: [r for r in records if r.status == status] for status in ("ok", "refused", "failed")}
    assert {status: len(found) for status, found in by_status.items()} == {"ok": 46, "refused": 6, "failed": 8}
    for request, record in zip(plan, records, strict=True):
        num_tokens = {"ok": 8, "refused": 0, "failed": 4}[record.status]
        assert record.num_prompt_tokens == len(request.prompt_token_ids)
        assert record.output_digest == digest(fake_answer(request.prompt_token_ids, num_tokens))
        assert len(record.token_times_s) == num_tokens
        times = (record.due_s, record.sent_s, *record.token_times_s, record.end_s or 0.0)
        assert list(times) == sorted(times)
    assert {record.error for record in by_status["refused"]} == {"RESOURCE_EXHAUSTED: refused, as configured"}
    assert {record.error for record in by_status["failed"]} == {"UNAVAILABLE: ended halfway, as configured"}
    assert len({record.request_id for record in by_status["ok"]}) == 46


def test_a_stall_shows_in_the_longest_gap_and_in_attainment(tmp_path: Path) -> None:
    timing = FakeTiming(ttft_s=0.02, tpot_s=0.01, stall_at_s=0.5, stall_s=1.0)
    scenario = random_scenario(60, rate_per_s=60.0, osl=20)
    records = played(scenario, timing, tmp_path)
    score = evaluate(records, Slo(tpot_s=0.025), 1.0)  # which an answer of 20 tokens with such a gap cannot meet
    assert score.num_ok == 60
    assert score.itl.max > 0.5
    stalled = [record for record in records if (record.max_itl_s or 0.0) > 0.5]
    assert score.num_good <= 60 - len(stalled)
    assert 0 < len(stalled) < 60


def test_a_later_turn_follows_the_answer_before_it(tmp_path: Path) -> None:
    scenario = Scenario(
        workload=MultiTurnWorkload(turns=3, new_tokens=5, osl=4, think_time_s=0.0, seed=1),
        arrivals=ArrivalConfig(rate_per_s=60.0, num_requests=12, seed=2),
    )
    records = played(scenario, QUICK, tmp_path)
    said: dict[int, tuple[int, ...]] = {}
    for request, record in zip(planned(scenario), records, strict=True):
        before = () if request.after is None else said[request.after]
        prompt = (*before, *request.prompt_token_ids)
        answer = fake_answer(prompt, 4)
        assert (record.status, record.num_prompt_tokens, record.output_digest) == ("ok", len(prompt), digest(answer))
        said[request.index] = (*prompt, *answer)
        if request.after is not None:
            assert record.due_s == max(request.due_s, records[request.after].end_s or 0.0)
    assert max(record.num_prompt_tokens for record in records) == 5 + 2 * 9


def test_the_turns_after_a_failed_one_have_failed(tmp_path: Path) -> None:
    scenario = Scenario(
        workload=MultiTurnWorkload(turns=3, new_tokens=5, osl=4, think_time_s=0.0, seed=1),
        arrivals=ArrivalConfig(rate_per_s=3.0, num_requests=3, seed=2),
    )
    records = played(scenario, FakeTiming(ttft_s=0.02, tpot_s=0.002, fail_every=1), tmp_path)
    failed = {record.index: record.error for record in records if record.status == "failed"}
    assert sorted(failed) == [0, 1, 2]
    after = {request.index: request.after for request in planned(scenario)}
    for index, error in failed.items():
        assert ("the turn before it failed" in error) == (after[index] is not None)


def test_what_is_due_beyond_the_cap_is_dropped(tmp_path: Path) -> None:
    scenario = Scenario(
        workload=RandomWorkload(isl=4, osl=4),
        arrivals=ArrivalConfig(kind="burst", rate_per_s=10.0, burst_size=5, num_requests=5),
    )
    options = GeneratorOptions(nice=0, max_in_flight=2)
    records = played(scenario, FakeTiming(ttft_s=1.0, tpot_s=0.001), tmp_path, options)
    assert [record.status for record in records] == ["ok", "ok", "dropped", "dropped", "dropped"]
    assert records[4].error == "2 requests were in flight"
    assert records[4].end_s is None


def test_a_deadline_is_one_of_every_request(tmp_path: Path) -> None:
    options = GeneratorOptions(nice=0, request_timeout_s=0.1)
    records = played(random_scenario(4), FakeTiming(ttft_s=30.0), tmp_path, options)
    assert [record.status for record in records] == ["deadline"] * 4
    assert {record.error.partition(":")[0] for record in records} == {"DEADLINE_EXCEEDED"}


@pytest.mark.slow
def test_a_run_without_a_gateway_is_an_error_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no gateway answers within 10 s \(UNAVAILABLE: .*onnect"):
        play(random_scenario(4), f"127.0.0.1:{free_port()}", tmp_path / "run.jsonl", PLAIN)


def locust(folder: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Locust as a user would call it, headless."""
    scenario = folder / "scenario.yaml"
    scenario.write_text("workload: {kind: random, isl: 4, osl: 4}\narrivals: {rate_per_s: 50, num_requests: 20}\n")
    command = [*locust_command(), "--headless", f"--host={address}", f"--scenario={scenario}", *arguments]
    return subprocess.run(
        command, cwd=folder, env=locust_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_the_exit_status_says_whether_the_limits_were_met(tmp_path: Path) -> None:
    with fake_server(QUICK) as server:
        statuses = tmp_path / "stats"
        met = locust(tmp_path, server.address, "--slo-ttft-ms=30000", f"--json-file={statuses}")
        missed = locust(tmp_path, server.address, "--slo-ttft-ms=1", f"--record={tmp_path / 'missed.jsonl'}")
    # A busy machine makes a generator late, and then the run does not count at all; see goodput.py.
    assert met.returncode == (2 if "not valid" in met.stderr else 0), met.stderr
    assert missed.returncode == (2 if "not valid" in missed.stderr else 1), missed.stderr
    stats = json.loads(statuses.with_suffix(".json").read_text())
    assert {(entry["method"], entry["name"], entry["num_requests"], entry["num_failures"]) for entry in stats} == {
        ("generate", "TTFT", 20, 0),
        ("generate", "TPOT", 20, 0),
        ("generate", "E2E", 20, 0),
    }
    assert read_info(tmp_path / "missed.jsonl").ttft_slo_s == 0.001


def test_options_that_cannot_be_end_locust_before_anything_is_sent(tmp_path: Path) -> None:
    ended = locust(tmp_path, "127.0.0.1:1", "--rate=fast")
    assert (ended.returncode, "--rate: expected a number; got 'fast'" in ended.stderr) == (2, True)
    ended = locust(tmp_path, "127.0.0.1:1", "--min-attainment=2")
    assert (ended.returncode, "--min-attainment" in ended.stderr) == (2, True)


def test_a_key_does_not_go_to_another_machine_in_clear_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_API_KEY", KEY)
    ended = locust(tmp_path, "192.0.2.1:8470")
    assert (ended.returncode, "api_key (DISAGG_API_KEY): 192.0.2.1:8470 is another machine" in ended.stderr) == (
        2,
        True,
    )
    assert KEY not in ended.stderr + ended.stdout
    with pytest.raises(ConfigError, match=r"^api_key \(DISAGG_API_KEY\): 192\.0\.2\.1:8470 is another machine"):
        play(random_scenario(4), "192.0.2.1:8470", tmp_path / "run.jsonl", PLAIN)


def test_locusts_page_plays_one_run_after_the_other_for_its_own_forms_only(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("workload: {kind: random, isl: 4, osl: 4}\narrivals: {rate_per_s: 50, num_requests: 20}\n")
    record, other, port = tmp_path / "run.jsonl", tmp_path / "other.jsonl", free_port()
    root = f"http://127.0.0.1:{port}"
    with fake_server(QUICK) as server:
        command = [sys.executable, "-m", "disagg.cli", "load", "run", "--web", f"--web-port={port}"]
        command += [f"--address={server.address}", f"--scenario={scenario}", f"--record={record}"]
        with subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                assert process.stdout is not None
                found = re.fullmatch(rf"Locust's page: ({root}/\S{{32}}/) \(.*\)\n", process.stdout.readline().decode())
                assert found is not None
                page = found[1]
                assert '"extended_tabs": [{"key": "goodput", "title": "Goodput"}]' in _wait_for(page)
                assert _status(f"{root}/swarm", b"requests=3") == 404
                _refuses_other_sites(page, port)
                for field in (f"record={other}", "host=127.0.0.1:9", "generator_nice=7", "label=mine", "logfile=x"):
                    name = field.partition("=")[0]
                    assert _post(page + "swarm", f"requests=3&{field}") == (
                        f"{name} cannot be changed here: it is as on the command line"
                    )
                assert json.loads(_wait_for(page + "stats/requests"))["state"] == "ready"
                for requests in (20, 7):
                    started = _post(page + "swarm", f"host={server.address}&requests={requests}&user_count=1&run_time=")
                    assert started == "Swarming started using shape class 'UntilTheEnd'"
                    rows = _rows_of_whole_run(page + "stats/requests", requests)
                    assert rows["requests"] == f"{requests}, of which 0 refused, failed or dropped"
                    assert rows["attainment of both"] == "100.0%"
                assert (len(read_file(record)), other.exists()) == (7, False)
            finally:
                process.terminate()


def _refuses_other_sites(page: str, port: int) -> None:
    foreign = (
        {"Host": "rebound.example"},
        {"Host": f"rebound.example:{port}"},
        {"Origin": "https://site.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    )
    for headers in foreign:
        assert (_status(page, None, headers), _status(page + "swarm", b"requests=3", headers)) == (403, 403), headers
    assert _status(page + "user", b"{}") == 403
    own = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
    assert _status(page + "stats/reset", b"", own) == 200
    assert _status(page, None, {"Host": f"localhost:{port}", "Sec-Fetch-Site": "none"}) == 200


def _status(url: str, data: bytes | None, headers: dict[str, str] | None = None) -> int:
    request = urllib.request.Request(url, data, headers or {})
    opener = urllib.request.OpenerDirector()
    opener.add_handler(urllib.request.HTTPHandler())
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers
        return int(answer.status)


def _wait_for(url: str) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return str(answer.read(), "utf-8")
        except OSError:
            assert time.monotonic() < deadline, "Locust's page does not come up"
            time.sleep(0.1)


def _post(url: str, form: str) -> str:
    """The answer of Locust to a form."""
    with urllib.request.urlopen(url, data=form.encode(), timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["message"])


def _rows_of_whole_run(url: str, num_requests: int) -> dict[str, str]:
    """The goodput table, once it has that many requests, and Locust would take another run."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        stats: dict[str, Any] = json.loads(_wait_for(url))
        (table,) = stats["extended_stats"]
        rows = {row["name"]: row["value"] for row in table["data"]}
        if stats["state"] == "stopped" and rows.get("requests", "").startswith(f"{num_requests},"):
            return rows
        assert time.monotonic() < deadline, f"{stats['state']}: {rows}"
        time.sleep(0.1)
