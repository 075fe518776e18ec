"""What `disagg doctor` thinks of what it reads, and its exit status."""

from __future__ import annotations

import io
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli.doctor import command as doctor
from disagg.cli.doctor import gateway as doctor_gateway
from disagg.cli.doctor import local as doctor_local
from disagg.cli.doctor import pairs as doctor_pairs
from disagg.cli.doctor.finding import Finding
from disagg.cluster.models.catalog import ModelEntry
from disagg.proto.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    DisaggError,
    PermissionDeniedError,
    UnavailableError,
)
from disagg.v1 import inference_pb2 as pb

# ---------------------------------------------------------------- this machine


@pytest.mark.parametrize(("version", "level"), [((3, 10, 14), "FAIL"), ((3, 11, 0), "ok"), ((4, 0, 0), "ok")])
def test_python(version: tuple[int, int, int], level: str) -> None:
    assert doctor_local.python_finding(version).level == level


@pytest.mark.parametrize(
    ("kernels", "level", "next_step"),
    [
        ("cpu-c++ avx512", "ok", ""),
        ("torch reference (no C++ compiler on PATH)", "warn", "install a C++ compiler, such as g++"),
        ("torch reference (DISAGG_KERNELS=reference)", "warn", "unset DISAGG_KERNELS"),
        ("cpu-c++ avx512, without draw_rows (DISAGG_KERNELS)", "warn", "unset DISAGG_KERNELS"),
    ],
)
def test_engine(kernels: str, level: str, next_step: str) -> None:
    found = doctor_local.engine_finding({"torch": "2.13.0", "num_cuda_devices": 0, "cpu_kernels": kernels})
    assert (found.level, found.next_step) == (level, next_step)
    assert found.text.startswith(f"torch 2.13.0, 0 CUDA devices, CPU kernels: {kernels}")


def test_the_speed_of_products_and_what_a_token_takes_by_it() -> None:
    speed = [{"threads": 1, "read_gb_s": 20.0, "gflop_s": 250.0}, {"threads": 2, "read_gb_s": 30.0, "gflop_s": 500.0}]
    model = ModelEntry(name="m", path="/m", source="", architecture="", nbytes=400_000_000)
    text = doctor_local.speed_finding({"cpu_dtype": "bfloat16", "speed": speed}, model).text
    assert text == (
        "bfloat16 by the engine's products, 1 thread: reads 20.0 GB/s, multiplies 250 GFLOP/s; 2 threads: reads 30.0 "
        "GB/s, multiplies 500 GFLOP/s; on one thread a token of m takes 20 ms, one of a prompt 1.6 ms"
    )
    slow = doctor_local.speed_finding({"cpu_dtype": "float32", "speed": speed[:1]}, model).text
    assert slow.endswith("on one thread a token of m takes 40 ms, one of a prompt 1.6 ms")
    assert doctor_local.speed_finding({"cpu_dtype": "float32", "speed": speed[:1]}, None).text.endswith("GFLOP/s")


@pytest.mark.parametrize(
    ("num_devices", "changes", "level", "text"),
    [
        (2, {}, "ok", "2, CUDA 13.0"),
        (2, {"cuda": None, "num_cuda_devices": 0}, "FAIL", "2 NVIDIA devices, but torch 2.13.0 is built for CPUs"),
        (2, {"num_cuda_devices": 0}, "FAIL", "torch 2.13.0 (CUDA 13.0) sees none of 2 NVIDIA devices: its driver may"),
        (None, {"triton_lacks": ["Python.h"]}, "FAIL", "Triton cannot launch kernels: Python.h missing"),
    ],
)
def test_gpus(num_devices: int | None, changes: dict[str, object], level: str, text: str) -> None:
    described = {"torch": "2.13.0", "cuda": "13.0", "num_cuda_devices": 2, "triton_lacks": []} | changes
    found = doctor_local.gpu_finding(num_devices, described)
    assert found is not None
    assert found.level == level
    assert found.text.startswith(text)


@pytest.mark.parametrize("num_devices", [None, 0])
def test_a_machine_without_gpus_hears_nothing_of_them(num_devices: int | None) -> None:
    described = {"torch": "2.13.0", "cuda": "13.0", "num_cuda_devices": 0, "triton_lacks": ["Python.h"]}
    assert doctor_local.gpu_finding(num_devices, described) is None


@pytest.mark.parametrize(
    ("refusals", "level", "text"),
    [
        ({"triton": None, "flashinfer": "not here"}, "ok", "auto is triton; flashinfer: not here"),
        ({"triton": None, "flashinfer": None}, "ok", "auto is triton; flashinfer: can be named in kernels.attention"),
        ({"triton": "it is wrong", "flashinfer": "not here"}, "FAIL", "triton: it is wrong; flashinfer: not here"),
    ],
)
def test_attention(refusals: dict[str, str | None], level: str, text: str) -> None:
    found = doctor_local.attention_finding({"attention": refusals, "num_cuda_devices": 1})
    assert (found.level, found.text) == (level, text)


@pytest.mark.parametrize(("refusal", "known"), [(None, "there is none to try it"), ("not here", "not here")])
def test_attention_of_a_machine_without_gpus(refusal: str | None, known: str) -> None:
    refusals = {"triton": refusal, "flashinfer": "it is not installed"}
    found = doctor_local.attention_finding({"attention": refusals, "num_cuda_devices": 0})
    assert found.level == "ok"
    assert found.text.endswith(f"on a GPU auto is triton ({known}); flashinfer: it is not installed")


@pytest.mark.parametrize(
    ("version", "error", "level", "text"),
    [
        ("1.5.1", "", "ok", "NIXL 1.5.1 works within this host (has POSIX, UCX); auto on CPU is shm"),
        ("1.5.1", "no way", "warn", "NIXL 1.5.1 moves nothing within this host: no way; auto on CPU is shm"),
        ("", "transport nixl needs the extra", "ok", "NIXL is not installed; auto on CPU is shm"),
    ],
)
def test_transports(version: str, error: str, level: str, text: str) -> None:
    found = doctor_local.transports_finding({"version": version, "plugins": ["POSIX", "UCX"], "error": error})
    assert (found.level, found.name) == (level, "transports")
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (subprocess.TimeoutExpired("check", 90.0), "its check did not end in 90 s"),
        (subprocess.CompletedProcess([], -11, "", ""), "exit status -11"),
        (subprocess.CompletedProcess([], 1, "", "Traceback\nOSError: no port\n"), "OSError: no port"),
    ],
)
def test_a_check_of_nixl_that_crashes_or_hangs(
    done: subprocess.CompletedProcess[str] | Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        if isinstance(done, Exception):
            raise done
        return done

    monkeypatch.setattr(subprocess, "run", run)
    found = doctor_local._transports()
    assert found.level == "warn"
    assert f"moves nothing within this host: {text}; auto" in found.text


def test_a_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: libtorch.so: no such file\n")

    monkeypatch.setattr(subprocess, "run", fail)
    found = next(found for found in doctor_local.local_findings() if found.name == "engine")
    assert found == Finding(
        "FAIL",
        "engine",
        "torch does not load: ImportError: libtorch.so: no such file",
        "install disagg anew: make install",
    )


@pytest.mark.parametrize(("num_cores", "level"), [(1, "warn"), (2, "ok")])
def test_cores(num_cores: int, level: str) -> None:
    assert doctor_local.cores_finding(num_cores).level == level


@pytest.mark.parametrize(("gib", "level"), [(2.9, "warn"), (3.0, "ok")])
def test_memory(gib: float, level: str) -> None:
    found = doctor_local.memory_finding(int(gib * 2**30) + 1)
    assert (found.level, found.text.split(" ")[0]) == (level, f"{gib:.1f}")


@pytest.mark.parametrize(
    ("limit", "level", "text"),
    [
        (1024, "warn", "at most 1024, and every connection of a client is one"),
        (4096, "ok", "at most 4096"),
        (resource.RLIM_INFINITY, "ok", "no limit"),
    ],
)
def test_open_files(limit: int, level: str, text: str) -> None:
    found = doctor_local.files_finding(limit)
    assert (found.level, found.text) == (level, text)


@pytest.mark.parametrize(
    ("has_token", "file_mode", "auth_mode", "level", "text"),
    [
        (True, 0o600, "", "ok", "2.60.0, with a token for clusters of several machines"),
        (True, None, "token", "ok", "2.60.0, with a token for clusters of several machines"),
        (True, 0o644, "", "warn", "2.60.0; others can read the token in ~/.ray/auth_token (mode 644)"),
        (
            True,
            0o600,
            "disabled",
            "warn",
            "2.60.0; RAY_AUTH_MODE=disabled: clusters of several machines run without authentication",
        ),
        (
            False,
            None,
            "",
            "ok",
            "2.60.0; no token yet, which only `ray up` needs: ray get-auth-token --generate",
        ),
    ],
)
def test_ray(has_token: bool, file_mode: int | None, auth_mode: str, level: str, text: str) -> None:
    found = doctor_local.ray_finding("2.60.0", has_token, file_mode, auth_mode)
    assert (found.level, found.text) == (level, text)


@pytest.mark.parametrize(
    ("names", "level", "text"),
    [
        ([], "warn", "none in /m"),
        (["other"], "warn", "other in /m; not the default one"),
        (["other", "smollm2-135m"], "ok", "other, smollm2-135m in /m"),
    ],
)
def test_models(names: list[str], level: str, text: str) -> None:
    entries = [ModelEntry(name=name, path="", source="", architecture="", nbytes=1) for name in names]
    found = doctor_local.models_finding(entries, Path("/m"))
    assert (found.level, found.text) == (level, text)
    assert found.next_step == ("" if level == "ok" else "disagg model import smollm2-135m")


def test_models_name_their_format_and_what_cannot_be_served() -> None:
    entry = ModelEntry(name="smollm2-135m", path="", source="", architecture="", nbytes=1, weight_format="fp8")
    assert doctor_local.models_finding([entry], Path("/m")).text == "smollm2-135m (fp8) in /m"
    found = doctor_local.models_finding([entry], Path("/m"), {"smollm2-135m": "config.json: no"})
    assert (found.level, found.text) == ("warn", "smollm2-135m cannot be served: config.json: no")
    assert found.next_step == "disagg model import --force"


# ---------------------------------------------------------------- a cluster


@pytest.mark.parametrize(
    ("address", "tls", "level"),
    [
        ("127.0.0.1:1", False, "ok"),
        ("[::1]:1", False, "ok"),
        ("localhost:1", False, "ok"),
        ("10.0.0.5:1", False, "warn"),
        ("10.0.0.5:1", True, "ok"),
        ("10.0.0.5:1", None, "FAIL"),
    ],
)
def test_transport(address: str, tls: bool | None, level: str) -> None:
    assert doctor_gateway.transport_finding(address, tls).level == level


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AuthenticationError("x"), "a:1 requires an API key"),
        (UnavailableError("reset", "unreachable"), "something listens at a:1, but no gRPC answers: reset"),
        (UnavailableError("going away", "shutting_down"), "shutting_down: going away"),
        (DeadlineError("late"), "timeout: late"),
    ],
)
def test_a_gateway_that_does_not_tell(error: DisaggError, text: str) -> None:
    found = doctor_gateway.grpc_failure("a:1", error, lacks_ca=False)
    assert (found.level, found.text) == ("FAIL", text)


def test_the_port_of_http_says_where_grpc_is() -> None:
    error = UnavailableError("reset", "unreachable")
    found = doctor_gateway.grpc_failure("a:8471", error, lacks_ca=False, is_http=True)
    assert found.text == "a:8471 speaks HTTP; gRPC is at a:8470, unless gateway.port says otherwise"


def test_a_gateway_that_cannot_be_trusted_for_lack_of_a_ca() -> None:
    found = doctor_gateway.grpc_failure("a:1", UnavailableError("reset", "unreachable"), lacks_ca=True)
    assert found.text == "a:1 has TLS, and DISAGG_CA_CERT names no CA for it"
    assert found.next_step.startswith("export DISAGG_CA_CERT=FILE")


@pytest.mark.parametrize(
    ("http_address", "address", "where"),
    [
        ("127.0.0.1:8471", "127.0.0.1:8470", "127.0.0.1:8471"),
        ("0.0.0.0:8471", "10.0.0.5:8470", "10.0.0.5:8471"),
        ("[::]:8471", "[fe80::1]:8470", "[fe80::1]:8471"),
    ],
)
def test_where_http_is(http_address: str, address: str, where: str) -> None:
    assert doctor_gateway.reachable_from_here(http_address, address) == where


def test_a_key_goes_to_no_other_machine_in_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a tunnel: the gRPC address is here, and the gateway tells its own."""

    def fail(*_: object) -> int:
        raise AssertionError("it was asked")

    monkeypatch.setattr(doctor_gateway, "_get", fail)
    monkeypatch.setenv("DISAGG_API_KEY", "a-key-of-somebody")
    (found,) = doctor_gateway._http("10.0.0.5:8471", "127.0.0.1:8470", False)
    assert (found.level, found.name) == ("warn", "HTTP")
    assert found.text == "not checked: 10.0.0.5:8471 is another machine, to which the key would go in clear text"


@pytest.mark.parametrize(("status", "level"), [(200, "ok"), (401, "FAIL"), (503, "FAIL"), (404, "FAIL")])
def test_health(status: int, level: str) -> None:
    assert doctor_gateway.health_finding("a:1", status).level == level


def worker(name: str, role: str = "", phase: str = "ready", fingerprint: str = "f", detail: str = "") -> pb.WorkerState:
    roles = role.split("+") if role else [name.rpartition("/")[2].partition("-")[0]]
    return pb.WorkerState(worker_id=name, roles=roles, phase=phase, fingerprint=fingerprint, detail=detail)


def state(*workers: pb.WorkerState, **desired: int) -> pb.GetClusterStateResponse:
    """Pools by their desired sizes; of each as many are ready as workers say."""
    pools = [
        pb.PoolState(
            name=name,
            desired=size,
            ready=sum(w.phase == "ready" and w.worker_id.startswith(name) for w in workers),
        )
        for name, size in desired.items()
    ]
    return pb.GetClusterStateResponse(workers=workers, pools=pools)


def found_of(cluster: pb.GetClusterStateResponse) -> list[tuple[str, str, str]]:
    return [(found.level, found.name, found.text) for found in doctor_gateway.worker_findings(cluster)]


def test_a_cluster_that_is_well() -> None:
    assert found_of(state(worker("prefill-0"), worker("decode-0"), prefill=1, decode=1)) == [
        ("ok", "workers", "2, all ready"),
        ("ok", "model", "the same everywhere (f)"),
    ]


def test_notes_are_shown() -> None:
    cluster = state(worker("prefill-0"), prefill=1)
    cluster.notes.append("prefill-0: its disk tier of KV is off: No space left on device")
    assert found_of(cluster)[1] == ("warn", "note", "prefill-0: its disk tier of KV is off: No space left on device")


def test_a_pool_that_lacks_a_worker_fails() -> None:
    lost = worker("decode-0", phase="lost", detail="killed")
    assert found_of(state(worker("prefill-0"), lost, prefill=1, decode=1))[0] == (
        "FAIL",
        "workers",
        "decode-0 is lost (killed); pool decode has 0 of 1",
    )


def test_a_worker_that_leaves_is_no_failure() -> None:
    leaving = worker("decode-1", phase="draining")
    assert found_of(state(worker("decode-0"), leaving, decode=1))[0] == ("warn", "workers", "decode-1 is draining")


def test_two_models_fail() -> None:
    assert found_of(state(worker("prefill-0"), worker("decode-0", fingerprint="g"), prefill=1, decode=1))[1] == (
        "FAIL",
        "model",
        "not the same everywhere: prefill-0 f, decode-0 g",
    )


def test_each_of_several_models_is_the_same_everywhere() -> None:
    workers = [worker(f"{model}/{role}-0", fingerprint=model) for model in "ab" for role in ("prefill", "decode")]
    assert found_of(state(*workers, worker("b/decode-1", fingerprint="x")))[2:4] == [
        ("ok", "model a", "the same everywhere (a)"),
        ("FAIL", "model b", "not the same everywhere: b/prefill-0 b, b/decode-0 b, b/decode-1 x"),
    ]


def test_a_controller_that_is_away_is_a_warning() -> None:
    assert found_of(state(worker("prefill-0", phase="")))[0][:2] == ("warn", "controller")


def test_pairs() -> None:
    workers = [
        worker("prefill-0"),
        worker("prefill-1", phase="draining"),
        worker("decode-0"),
        worker("decode-1"),
        worker("decode-2", phase="starting"),
        worker("colocated-0", "prefill+decode"),
    ]
    assert doctor_pairs.pairs_of(workers) == [("prefill-0", "decode-0"), ("prefill-0", "decode-1")]


def test_pairs_are_of_one_model() -> None:
    workers = [worker(f"{model}/{role}-0") for model in "ab" for role in ("prefill", "decode")]
    assert doctor_pairs.pairs_of(workers) == [("a/prefill-0", "a/decode-0"), ("b/prefill-0", "b/decode-0")]


def probe_of(moved: int, exposed_ms: float) -> pb.ProbePairResponse:
    return pb.ProbePairResponse(kv_bytes=moved, expected_bytes=4_000_000, exposed_ms=exposed_ms, transport="gloo")


@pytest.mark.parametrize(
    ("probes", "level", "text"),
    [
        ([(4_000_000, 9.0), (4_000_000, 2.0)], "ok", "p -> d: 3.8 MiB by gloo in 2.0 ms, 2000 MB/s (best of 2)"),
        ([(4_000_000, 640.0)], "ok", "p -> d: 3.8 MiB by gloo in 640.0 ms, 6.25 MB/s (best of 1)"),
        ([(4_000_000, 0.0)], "ok", "p -> d: 3.8 MiB by gloo in 0.0 ms (best of 1)"),
        ([(4_000_000, 2.0), (3_999_999, 2.0)], "FAIL", "p -> d: 3999999 bytes moved, the prompt has 4000000"),
        ([(0, 0.0)], "FAIL", "p -> d: 0 bytes moved, the prompt has 4000000"),
    ],
)
def test_what_a_pair_moved(probes: list[tuple[int, float]], level: str, text: str) -> None:
    found = doctor_pairs.pair_finding("p", "d", [probe_of(*probe) for probe in probes])
    assert (found.level, found.text) == (level, text)


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ({}, []),
        ({("p", "d"): 1.0}, []),
        ({("p", "d"): 1000.0, ("p", "e"): 333.0}, ["p -> e moves 333 MB/s where others move 1000 MB/s"]),
        ({("p", "d"): 1000.0, ("p", "e"): 334.0}, []),
        (
            {("p", "d"): 900.0, ("p", "e"): 1000.0, ("q", "d"): 5.5, ("q", "e"): 2000.0, ("r", "d"): 1100.0},
            ["q -> d moves 5.50 MB/s where others move 1000 MB/s"],
        ),
    ],
)
def test_pairs_that_lag_behind(rates: dict[tuple[str, str], float], slow: list[str]) -> None:
    found = doctor_pairs.slow_findings(rates)
    assert [(each.level, each.text) for each in found] == [("warn", text) for text in slow]


class Cluster:
    """A client of a cluster whose probes come out as they are told to."""

    def __init__(
        self, told: pb.GetClusterStateResponse | DisaggError, **probes: pb.ProbePairResponse | DisaggError
    ) -> None:
        self._told = told
        self._probes = probes
        self.keys: DisaggError | None = None
        self.probed: list[tuple[str, str]] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def models(self) -> list[pb.Model]:
        """Asked without a key."""
        if self.keys is not None:
            raise self.keys
        return []

    def cluster_state(self) -> pb.GetClusterStateResponse:
        if isinstance(self._told, DisaggError):
            raise self._told
        return self._told

    def probe(self, prefill: str, decode: str) -> pb.ProbePairResponse:
        self.probed.append((prefill, decode))
        outcome = self._probes[decode.replace("-", "_")]
        if isinstance(outcome, DisaggError):
            raise outcome
        return outcome


GOOD_PROBE = pb.ProbePairResponse(kv_bytes=8, expected_bytes=8, exposed_ms=1, transport="gloo")
TWO_PAIRS = state(worker("prefill-0"), worker("decode-0"), worker("decode-1"), prefill=1, decode=2)


def levels_of(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, tls: bool | None = False) -> list[str]:
    monkeypatch.setattr(doctor_gateway, "open_client", lambda address: cluster)
    monkeypatch.setattr(doctor_gateway, "Client", lambda address, api_key: cluster)
    monkeypatch.setattr(doctor_gateway, "speaks_tls", lambda address: tls)
    return [f"{found.level} {found.name}" for found in doctor_gateway.gateway_findings("127.0.0.1:1")]


def test_every_pair_is_tried_whatever_becomes_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(TWO_PAIRS, decode_0=UnavailableError("full", "no_room"), decode_1=GOOD_PROBE)
    assert levels_of(monkeypatch, cluster) == [
        "ok TLS",
        "ok gRPC",
        "ok API keys",
        "warn HTTP",
        "ok workers",
        "ok model",
        "FAIL KV",
        "ok KV",
    ]
    assert cluster.probed == [("prefill-0", "decode-0")] + [("prefill-0", "decode-1")] * doctor_pairs.NUM_CHECKS


def test_a_slow_pair_is_told_after_all_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = pb.ProbePairResponse(kv_bytes=8, expected_bytes=8, exposed_ms=100, transport="gloo")
    cluster = Cluster(TWO_PAIRS, decode_0=slow, decode_1=GOOD_PROBE)
    assert levels_of(monkeypatch, cluster)[-3:] == ["ok KV", "ok KV", "warn KV"]


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (None, Finding("ok", "API keys", "not required; whoever reaches the gateway may use it")),
        (AuthenticationError("x"), Finding("ok", "API keys", "required")),
        (DeadlineError("late"), Finding("warn", "API keys", "unclear: timeout: late")),
    ],
)
def test_keys(monkeypatch: pytest.MonkeyPatch, error: DisaggError | None, finding: Finding) -> None:
    cluster = Cluster(TWO_PAIRS)
    cluster.keys = error
    monkeypatch.setattr(doctor_gateway, "Client", lambda address, api_key: cluster)
    assert doctor_gateway.keys_finding("a:1") == finding


def test_who_may_not_probe_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(TWO_PAIRS, decode_0=PermissionDeniedError("no"))
    assert levels_of(monkeypatch, cluster)[-1] == "warn KV"
    assert len(cluster.probed) == 1


def test_what_does_not_answer_is_not_asked_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gateway, "speaks_http", lambda address: False)
    assert levels_of(monkeypatch, Cluster(UnavailableError("x", "unreachable"))) == ["ok TLS", "FAIL gRPC"]
    assert levels_of(monkeypatch, Cluster(AuthenticationError("x")), tls=None)[0] == "FAIL port"


def test_colocated_workers_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    both = state(worker("colocated-0", "prefill+decode"), colocated=1)
    assert levels_of(monkeypatch, Cluster(both))[-1] == "ok KV"
    assert levels_of(monkeypatch, Cluster(state(worker("prefill-0"), prefill=1)))[-1] == "FAIL KV"


# ---------------------------------------------------------------- the command


def run(
    monkeypatch: pytest.MonkeyPatch, address: str | None, *, is_open: bool, local: Finding, cluster: Finding
) -> tuple[int, str]:
    def gateway(_: str) -> Iterator[Finding]:
        yield cluster

    monkeypatch.setattr(doctor, "local_findings", lambda: iter([local]))
    monkeypatch.setattr(doctor, "gateway_findings", gateway)
    monkeypatch.setattr(doctor, "is_open", lambda address: is_open)
    out = io.StringIO()
    status = doctor.run_doctor(address, Console(file=out, width=80))
    return status, "\n".join(line.rstrip() for line in out.getvalue().splitlines())


OK, WARN = Finding("ok", "cores", "2"), Finding("warn", "models", "none", "disagg model import x")
BAD = Finding("FAIL", "KV", "p -> d: [0] bytes", "disagg drain d")


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "x:1", is_open=True, local=WARN, cluster=OK) == (
        0,
        "This machine\n"
        "  warn  models      none\n"
        "                    next: disagg model import x\n"
        "\n"
        "Cluster at x:1\n"
        "  ok    cores       2\n"
        "\n"
        "everything works",
    )


def test_a_failure_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = run(monkeypatch, "x:1", is_open=True, local=OK, cluster=BAD)
    assert status == 1
    assert text.endswith(
        "  FAIL  KV          p -> d: [0] bytes\n                    next: disagg drain d\n\n1 of these failed"
    )


def test_no_cluster_is_no_failure_unless_one_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = run(monkeypatch, None, is_open=False, local=OK, cluster=BAD)
    assert (status, "none runs there\n" in text) == (0, True)
    assert run(monkeypatch, "x:1", is_open=False, local=OK, cluster=BAD)[0] == 1
    assert run(monkeypatch, None, is_open=True, local=OK, cluster=BAD)[0] == 1


def test_what_is_no_address() -> None:
    with pytest.raises(ConfigError, match=r"^--address: expected host:port"):
        doctor.run_doctor("x", Console(file=io.StringIO()))
