from __future__ import annotations

import io
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from disagg.cli import up
from disagg.cli.launch.progress import LaunchDisplay, StillBusy
from disagg.cluster.config.cluster_config import ClusterConfig, GatewaySection, parse_config
from disagg.cluster.config.schema import ModelSection, SloConfig
from disagg.cluster.control.cluster import CheckStop, never_stop
from disagg.cluster.control.plan import ClusterPlan, plan_cluster
from disagg.cluster.system.children import LaunchError
from disagg.proto.control import ControlState
from disagg.proto.errors import ConfigError
from disagg.proto.messages import StepSample, WorkerInfo
from tests.support.control import settled
from tests.support.pooled_models import write_embedder
from tests.unit.cluster.control.test_plan import make_info


class StubCluster:
    """Does what it is told when asked to start, and counts stops."""

    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(self, config: ClusterConfig, on_start: Callable[[], None]) -> None:
        self._plan = plan_cluster(config)
        self._on_start = on_start
        self.control = settled({"prefill": 1, "decode": 1})
        self.look: Callable[[], object] = lambda: None
        self.num_stops = 0

    @property
    def plan(self) -> ClusterPlan:
        return self._plan

    @property
    def address(self) -> str:
        return "127.0.0.1:9"

    @property
    def http_address(self) -> str:
        return "127.0.0.1:10"

    @property
    def workers(self) -> list[WorkerInfo]:
        return [make_info("prefill-0"), make_info("decode-0")]

    def start(self, check_stop: CheckStop = never_stop) -> None:
        self._on_start()
        check_stop()

    def state(self) -> ControlState:
        self.look()
        return self.control.core.state()

    def stop(self) -> None:
        self.num_stops += 1


class Run:
    """`run_up` on a stub."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_start: Callable[[], None] = lambda: None) -> None:
        self.config = parse_config({"model": {"path": "fake"}})
        self.cluster = StubCluster(self.config, on_start)
        self.out = io.StringIO()
        monkeypatch.setattr(up, "make_cluster", lambda *arguments: self.cluster)
        monkeypatch.setattr(up, "WATCH_INTERVAL_S", 0.001)

    def __call__(self) -> int:
        return up.run_up(self.config, "processes", Console(file=self.out, width=200))


@pytest.fixture
def hang_up() -> Iterator[None]:
    """SIGHUP is not ignored, also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_status_0(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    run = Run(monkeypatch)

    run.cluster.look = lambda: signal.raise_signal(number)
    assert run() == 0
    assert run.cluster.num_stops == 1
    text = run.out.getvalue()
    assert "serving fake on 127.0.0.1:9 (gRPC), 127.0.0.1:10 (HTTP)\npage: http://127.0.0.1:10/\n" in text
    for line in up.lines_to_try("127.0.0.1:9", "127.0.0.1:10", ["fake"], run.config.gateway):
        assert f"\n  {line}\n" in text
    assert text.endswith("stopping\n")
    assert signal.getsignal(number) is before


def test_notes_are_shown_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.cluster.notes = ("placement.decodes: auto, and " + "x" * 300,)
    run.cluster.look = lambda: signal.raise_signal(signal.SIGTERM)
    assert run() == 0
    assert f"  note   {run.cluster.notes[0]}\n" in run.out.getvalue()


@pytest.mark.parametrize(("tpot_ms", "is_noted"), [(30.0, True), (60.0, False), (None, False)])
def test_a_target_that_no_worker_can_meet_is_noted(
    monkeypatch: pytest.MonkeyPatch, tpot_ms: float | None, is_noted: bool
) -> None:
    run = Run(monkeypatch)
    steps = [StepSample(50.0 + rows, 0, 0, rows, rows * each) for rows in (1, 8, 32) for each in (64, 512)]
    slow = msgspec.structs.replace(make_info("decode-0"), roles=("decode",), calibration=tuple(steps))
    monkeypatch.setattr(StubCluster, "workers", [make_info("prefill-0"), slow])
    run.config = msgspec.structs.replace(run.config, slo=SloConfig(tpot_ms=tpot_ms))
    run.cluster.look = lambda: signal.raise_signal(signal.SIGTERM)
    assert run() == 0
    assert ("slo.tpot_ms is 30, and a decode step of one sequence takes 51" in run.out.getvalue()) is is_noted
    assert ("no answer can meet it" in run.out.getvalue()) is is_noted


def gateway_of(**keys: object) -> GatewaySection:
    return parse_config({"model": {"path": "fake"}, "gateway": keys}).gateway


@pytest.mark.parametrize(
    ("http_address", "gateway", "url"),
    [
        ("127.0.0.1:10", {}, "http://127.0.0.1:10/"),
        ("b:10", {"tls": {"cert": "/c", "key": "/k"}, "api_keys": "/k"}, "https://b:10/"),
        ("127.0.0.1:10", {"ui": False}, ""),
        ("127.0.0.1:10", {"allowed_hosts": ["example.org"]}, ""),
        ("", {}, ""),
    ],
)
def test_the_page_is_named_where_it_is_served(http_address: str, gateway: dict[str, object], url: str) -> None:
    assert up.page_url(http_address, gateway_of(**gateway)) == url


def test_hints_name_the_program_as_it_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "disagg"), "up"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    lines = up.lines_to_try("127.0.0.1:8470", "", ["fake"], gateway_of())
    assert [line.split()[0] for line in lines] == ["bin/disagg", "bin/disagg", "bin/python", "bin/disagg"]


def test_lines_to_try() -> None:
    chat, generate, curl, python, top = up.lines_to_try("127.0.0.1:9", "127.0.0.1:10", ["it's"], gateway_of())
    assert chat == "disagg chat --address 127.0.0.1:9"
    assert generate == 'disagg generate "What is a cache?" --address 127.0.0.1:9'
    assert top == "disagg top --address 127.0.0.1:9"
    words = shlex.split(curl)
    assert words[:-1] == [
        *("curl", "-N", "http://127.0.0.1:10/v1/chat/completions"),
        *("-H", "content-type: application/json", "-d"),
    ]
    assert json.loads(words[-1]) == {
        "model": "it's",
        "messages": [{"role": "user", "content": "What is a cache?"}],
        "max_tokens": 64,
        "stream": True,
    }
    assert shlex.split(python)[1] == "-c"
    compile(shlex.split(python)[2], "line", "exec")


def test_lines_to_try_name_a_model_that_gives_answers() -> None:
    models, gateway = ["bert", "llama"], gateway_of()
    chat, *_, curl, python, _ = up.lines_to_try("127.0.0.1:9", "127.0.0.1:10", models, gateway, {"bert"})
    assert chat == "disagg chat --model llama --address 127.0.0.1:9"
    assert json.loads(shlex.split(curl)[-1])["model"] == "llama"
    assert "model='llama'" in python


def test_a_model_of_vectors_alone_is_tried_by_a_rerank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    curl, top = up.lines_to_try("127.0.0.1:9", "127.0.0.1:10", ["bert"], gateway_of(), {"bert"})
    assert shlex.split(curl)[2] == "http://127.0.0.1:10/rerank"
    assert json.loads(shlex.split(curl)[-1]).keys() == {"model", "query", "documents"}
    assert top == "disagg top --address 127.0.0.1:9"
    run = Run(monkeypatch)
    folder = write_embedder(tmp_path)
    run.config = msgspec.structs.replace(run.config, model=ModelSection(path=str(folder)))
    run.cluster.look = lambda: signal.raise_signal(signal.SIGTERM)
    assert run() == 0
    assert "/rerank" in run.out.getvalue()
    assert "disagg chat" not in run.out.getvalue()


def test_the_usual_address_needs_no_option_and_without_http_there_is_no_curl() -> None:
    lines = up.lines_to_try("127.0.0.1:8470", "", ["fake"], gateway_of())
    assert [line.split()[1] for line in lines] == ["chat", "generate", "-c", "top"]
    assert not any("--address" in line for line in lines)


@pytest.mark.parametrize(
    ("gateway", "exports", "curl"),
    [
        (
            {"api_keys": "/k"},
            "export DISAGG_API_KEY=...",
            'curl -N http://b:10/v1/chat/completions -H "authorization: Bearer $DISAGG_API_KEY" -H ',
        ),
        (
            {"tls": {"cert": "/c", "key": "/k", "client_ca": "/a"}},
            "export DISAGG_CA_CERT=... DISAGG_CLIENT_CERT=... DISAGG_CLIENT_KEY=...",
            'curl -N https://b:10/v1/chat/completions --cacert "$DISAGG_CA_CERT" '
            '--cert "$DISAGG_CLIENT_CERT" --key "$DISAGG_CLIENT_KEY" -H ',
        ),
    ],
)
def test_keys_and_certificates_come_from_the_environment(gateway: dict[str, object], exports: str, curl: str) -> None:
    lines = up.lines_to_try("b:9", "b:10", ["fake"], gateway_of(**gateway))
    assert lines[0] == exports
    assert lines[3].startswith(curl)


def test_a_signal_while_starting_stops_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, on_start=lambda: signal.raise_signal(signal.SIGTERM))
    assert run() == 130
    assert run.cluster.num_stops == 1
    assert "serving" not in run.out.getvalue()


def test_a_failed_start_is_raised_after_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise LaunchError("no")

    run = Run(monkeypatch, on_start=fail)
    with pytest.raises(LaunchError):
        run()
    assert run.cluster.num_stops == 1


def test_what_happens_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    control = run.cluster.control
    why = "killed by SIGKILL; the end of its log:\n[oops] " + "x" * 300
    happens: Iterator[Callable[[], object]] = iter(
        [
            lambda: None,
            lambda: control.exited("decode-0", why),
            lambda: control.tick(1),
            lambda: control.stopped("decode-0"),
            lambda: control.register("decode-0", 2),
            lambda: control.scale(decode=2),
            lambda: control.scale(decode=1),
            lambda: control.stopped("decode-1"),
            lambda: signal.raise_signal(signal.SIGINT),
        ]
    )
    run.cluster.look = lambda: next(happens)()
    assert run() == 0
    told = run.out.getvalue().partition("Ctrl-C stops the cluster\n")[2]
    assert told.splitlines() == [
        "lost decode-0: killed by SIGKILL; the end of its log:",
        f"[oops] {'x' * 300}",
        "stopping decode-0",
        "starting decode-0",
        "ready decode-0",
        "starting decode-1",
        "stopping decode-1",
        "gone decode-1",
        "stopping",
    ]


def test_losing_the_controller_for_good_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.cluster.look = look_twice("the controller is gone")
    with pytest.raises(LaunchError, match="gone"):
        run()
    assert run.cluster.num_stops == 1


def look_twice(error: str) -> Callable[[], None]:
    """Raises at the third look."""
    looks = iter(range(2))

    def look() -> None:
        if next(looks, None) is None:
            raise LaunchError(error)

    return look


def test_a_hang_up_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = Run(monkeypatch, on_start=lambda: signal.raise_signal(signal.SIGHUP))
        run.cluster.look = look_twice("it goes on until here")
        with pytest.raises(LaunchError, match="until here"):
            run()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_danger_is_said_first_and_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, on_start=lambda: signal.raise_signal(signal.SIGTERM))
    run.cluster.warnings = ("open " + "x" * 300,)
    assert run() == 130
    assert run.out.getvalue().splitlines()[0] == f"  WARNING open {'x' * 300}"


def test_display_without_a_terminal_prints_a_line_per_process() -> None:
    out = io.StringIO()
    display = LaunchDisplay(Console(file=out, width=80))
    for name, state in (("a", "starting"), ("b", "starting"), ("b", "ready"), ("a", "ready"), ("a", "stopped")):
        display(name, state)
    assert [line.split()[:2] for line in out.getvalue().splitlines()] == [["ready", "b"], ["ready", "a"]]


def test_a_start_that_takes_long_says_what_goes_on() -> None:
    out, now = io.StringIO(), 0.0
    display = LaunchDisplay(Console(file=out, width=200), lambda: now)
    for name in ("prefill-0", "decode-0", "gateway"):
        display(name, "starting")
    for at, name, state in (
        (0.0, "prefill-0", "loads the weights"),
        (0.0, "decode-0", "loads the weights"),
        (4.0, "decode-0", "measures steps"),
        (5.5, "prefill-0", "ready"),
        (5.6, "decode-0", "ready"),
        (9.0, "gateway", "ready"),
    ):
        while now < at:
            now += 0.25
            display.busy.look()
        display(name, state)
    now = 60.0
    display.busy.look()
    assert out.getvalue().splitlines() == [
        "  ...    prefill-0, decode-0: loads the weights; gateway: starts (2.5 s)",
        "  ...    prefill-0: loads the weights; decode-0: measures steps; gateway: starts (5.0 s)",
        "  ready  prefill-0 (5.5 s)",
        "  ready  decode-0 (5.8 s)",
        "  ...    gateway: starts (8.2 s)",
        "  ready  gateway (9.0 s)",
    ]


def test_work_that_takes_long_says_so_again() -> None:
    out, now = io.StringIO(), 0.0
    busy = StillBusy(Console(file=out, width=200), lambda: now)
    busy.begin("converting [x]")
    for moment in (1.0, 2.4, 2.5, 4.9):
        now = moment
        busy.look()
    busy.begin("checking files")
    assert out.getvalue().splitlines() == [
        "  converting [x]",
        "  ...    converting [x] (2.5 s)",
        "  checking files",
    ]


def test_options_go_on_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{gateway: {port: 1}, pools: {decode: {size: 4}}, model: {path: /x/y, dtype: float16}}")
    config = up.build_config(file, port=2, prefill=3)
    assert (config.gateway.port, config.pools.prefill.size, config.pools.decode.size) == (2, 3, 4)
    assert (config.mode, config.model.served_name) == ("disaggregated", "y")
    assert up.build_config(file, colocated=True).mode == "colocated"


@pytest.mark.parametrize(
    ("model", "name", "path"),
    [("other", "other", None), ("fake", None, "fake"), ("./x", None, "./x"), ("/a/b", None, "/a/b")],
)
def test_the_model_option_is_a_name_or_a_path(tmp_path: Path, model: str, name: str | None, path: str | None) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: /x/y, name: z, dtype: float16}")
    config = up.build_config(file, model=model)
    assert (config.model.name, config.model.path, config.model.dtype) == (name, path, "float16")


def test_pool_sizes_do_not_go_with_colocated() -> None:
    with pytest.raises(
        ConfigError, match=r"^--prefill, --decode: a cluster of mode colocated has one pool; its size is"
    ):
        up.build_config(None, colocated=True, decode=2)


def test_the_modes_of_one_pool_take_its_size() -> None:
    elastic = up.build_config(None, elastic=True, workers=3)
    assert (elastic.mode, elastic.pools.workers.size, elastic.pools.workers.scheduling) == ("elastic", 3, "slack")
    colocated = up.build_config(None, colocated=True, workers=3)
    assert (colocated.mode, colocated.pools.colocated.size) == ("colocated", 3)
    with pytest.raises(ConfigError, match=r"^--workers: is for the modes colocated and elastic; use --prefill"):
        up.build_config(None, workers=3)
    with pytest.raises(ConfigError, match=r"^--colocated, --elastic: choose one$"):
        up.build_config(None, colocated=True, elastic=True)


def test_log_dir_is_refused_with_ray() -> None:
    with pytest.raises(ConfigError, match=r"^--log-dir: Ray keeps its own logs"):
        up.make_cluster(parse_config({}), "ray", lambda name, state: None, Path("/x"), "bfloat16")
