"""The twin as a child of the controller, with processes that are none."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping

import pytest

from disagg.cluster.config.cluster_config import LEAST_TRACES, ClusterConfig, parse_config
from disagg.cluster.control import twin_process as hosts_twin
from disagg.cluster.control.twin_process import MODULE, TwinProcess, TwinSettings, key_for, obstacle, twin_of
from disagg.simulator.twin.twin import LEAST

ADDRESS = "127.0.0.1:9"


class Child:
    """A process whose end is given."""

    def __init__(self, pid: int, settings: TwinSettings) -> None:
        self.pid = pid
        self.settings = settings
        self.status: int | None = None
        self.is_stopped = False

    def poll(self) -> int | None:
        return self.status


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    started: list[Child] = []

    def spawn(module: str, message: TwinSettings, environment: Mapping[str, str]) -> Child:
        assert module == MODULE
        assert "DISAGG_API_KEY" not in environment
        started.append(Child(len(started) + 1, message))
        return started[-1]

    def end(processes: list[Child], timeout_s: float) -> None:
        for process in processes:
            process.is_stopped = True

    monkeypatch.setattr(hosts_twin, "spawn", spawn)
    monkeypatch.setattr(hosts_twin, "end", end)
    return started


def test_it_begins_with_the_gateway_and_follows_it(children: list[Child]) -> None:
    twin = TwinProcess("sk-admin", (0, 1))
    twin.tick(0.0, "")
    assert (twin.pid, children) == (None, [])
    twin.tick(1.0, ADDRESS)
    assert [child.settings for child in children] == [TwinSettings(address=ADDRESS, api_key="sk-admin", cores=(0, 1))]
    twin.tick(2.0, "")  # the gateway is away: the twin waits for it
    twin.tick(3.0, ADDRESS)
    assert (len(children), children[0].is_stopped) == (1, False)
    twin.tick(4.0, "127.0.0.1:10")
    assert (children[0].is_stopped, children[1].settings.address) == (True, "127.0.0.1:10")
    twin.stop()
    twin.stop()
    assert (twin.pid, children[1].is_stopped) == (None, True)


def test_one_that_ends_is_started_again_later_and_later(children: list[Child]) -> None:
    twin = TwinProcess()
    starts: list[int] = []
    for now in range(100):
        if children and len(starts) < 5:
            children[-1].status = 1
        before = len(children)
        twin.tick(float(now), ADDRESS)
        if len(children) > before:
            starts.append(now)
    # It ends at once each time: pauses of 1, 2, 4, 8 s after the second in which that is seen.
    assert starts == [0, 2, 5, 10, 19]


def test_its_end_is_logged_and_one_that_ran_for_long_comes_back_soon(
    children: list[Child], caplog: pytest.LogCaptureFixture
) -> None:
    twin = TwinProcess()
    twin.tick(0.0, ADDRESS)
    assert caplog.messages == []
    children[0].status = -9
    twin.tick(200.0, ADDRESS)
    assert caplog.record_tuples == [
        (
            "disagg.cluster.control.twin_process",
            logging.WARNING,
            "the twin ended (killed by SIGKILL) and starts again in 0.5 s; until then the present setting of "
            "placement.decodes stays",
        )
    ]
    assert twin.pid is None
    twin.tick(200.4, ADDRESS)
    assert len(children) == 1
    twin.tick(200.5, ADDRESS)
    assert twin.pid == 2


def test_a_machine_that_makes_no_process_is_tried_again(
    children: list[Child], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> Child:
        raise OSError("no memory")

    twin = TwinProcess()
    with monkeypatch.context() as patched:
        patched.setattr(hosts_twin, "spawn", fail)
        twin.tick(0.0, ADDRESS)
    assert "the twin ended (it cannot be run: no memory) and starts again in 0.5 s" in caplog.text
    twin.tick(0.4, ADDRESS)
    assert children == []
    twin.tick(1.0, ADDRESS)
    assert twin.pid == 1


def auto(**sections: object) -> ClusterConfig:
    return parse_config({"mode": "elastic", "placement": {"decodes": "auto"}, **sections})


KEYED = {"api_keys": "keys.yaml"}
TLS = {"host": "10.0.0.1", "tls": {"cert": "c", "key": "k"}, **KEYED}


@pytest.mark.parametrize(
    ("config", "key", "environ", "num_cores", "why"),
    [
        (auto(), "", {}, 2, None),
        (parse_config({"mode": "elastic"}), "", {}, 1, None),
        (auto(), "", {}, 1, "this machine has one core; controller.twin: on starts it all the same"),
        (auto(controller={"twin": "on"}), "", {}, 1, None),
        (auto(controller={"twin": "off"}), "", {}, 8, "controller.twin is off"),
        (auto(gateway=KEYED), "", {}, 2, "it needs the key of an admin (DISAGG_API_KEY of disagg up"),
        (auto(gateway=KEYED), "sk-x", {}, 2, None),
        (auto(gateway=TLS), "sk-x", {}, 2, "it needs the CA of the gateway's certificate in DISAGG_CA_CERT"),
        (auto(gateway=TLS), "sk-x", {"DISAGG_CA_CERT": "ca.pem"}, 2, None),
        (
            auto(gateway={"host": "10.0.0.1", "tls": {"cert": "c", "key": "k", "client_ca": "a"}}),
            "",
            {"DISAGG_CA_CERT": "ca.pem"},
            2,
            "it needs the key of an admin, and there is no gateway.api_keys",
        ),
        (auto(gateway={"host": "10.0.0.1", "insecure": True}), "", {}, 2, "takes changes from its own machine only"),
        (auto(gateway={"host": "0.0.0.0", "insecure": True}), "", {}, 2, None),
    ],
)
def test_when_the_controller_starts_one(
    config: ClusterConfig, key: str, environ: dict[str, str], num_cores: int, why: str | None
) -> None:
    found = obstacle(config, key, environ, num_cores)
    if why is None:
        assert found == ""
    else:
        assert found.startswith("placement.decodes: auto, and the controller starts no twin: ")
        assert why in found
    is_started = twin_of(config, key, environ, range(num_cores)) is not None
    assert is_started == (why is None and config.placement.decodes == "auto")


def test_a_key_goes_only_to_a_twin_that_needs_one() -> None:
    environ = {"DISAGG_API_KEY": "sk-x"}
    assert key_for(auto(gateway=KEYED), environ) == "sk-x"
    assert key_for(auto(), environ) == ""
    assert key_for(parse_config({"gateway": KEYED}), environ) == ""
    assert "sk-x" not in repr(TwinSettings(address=ADDRESS, api_key="sk-x"))


def test_what_is_known_of_it_without_import_is_so() -> None:
    assert LEAST_TRACES == LEAST
    assert importlib.util.find_spec(MODULE) is not None
