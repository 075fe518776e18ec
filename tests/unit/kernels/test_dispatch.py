"""Which implementation is chosen, what is said about it, and how the C++ kernels are built."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu import build
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import AttentionForm, AttentionSpec, RopeWrite
from disagg.kernels.prefill_work import ChunkPlace
from tests.support.paged import prompts

pytestmark = pytest.mark.usefixtures("fresh_choice")

ANSWER = 'extern "C" int answer() { return 42; }\n'


def test_the_cpp_kernels_are_used_and_said_once(native: NativeOps, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "disagg.kernels.dispatch")
    assert dispatch.describe().startswith("cpu-c++ ")
    dispatch.rms_norm(torch.ones(1, 16), torch.ones(16), 1e-5)
    assert [record.getMessage() for record in caplog.records] == [f"CPU kernels: {dispatch.describe()}"]


def test_the_environment_forces_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "reference")
    monkeypatch.setattr(build, "build", None)
    assert dispatch.describe() == "torch reference (DISAGG_KERNELS=reference)"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    x, weight = torch.randn(2, 48), torch.randn(48)
    assert torch.equal(dispatch.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "fast")
    with pytest.raises(ValueError, match="DISAGG_KERNELS: 'fast' is not one of"):
        dispatch.describe()


def test_the_cpp_kernels_are_built_for_the_first_cpu_tensor(native: NativeOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that computes on a GPU alone compiles none."""
    builds: list[build.Library] = []
    build_library = build.library

    def counted(environ: Mapping[str, str]) -> build.Library:
        builds.append(build_library(environ))
        return builds[-1]

    monkeypatch.setattr(build, "library", counted)
    gpu = torch.device("meta")  # stands for one: its tensors are not on the CPU
    dispatch.set_num_threads(1)
    dispatch.drop_packing_memory()
    assert not dispatch.draws_on(gpu)
    assert dispatch.embed(torch.empty(2, dtype=torch.int64, device=gpu), torch.empty(3, 4, device=gpu)).shape == (2, 4)
    assert builds == []
    assert dispatch.embed(torch.tensor([1]), torch.eye(2)).tolist() == [[0.0, 1.0]]
    assert len(builds) == 1
    dispatch.rms_norm(torch.ones(1, 16), torch.ones(16), 1e-5)
    assert len(builds) == 1


def test_threads_that_were_set_before_hold_for_kernels_that_are_loaded_later(
    native: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    make = NativeOps

    def made(path: Path) -> NativeOps:
        found = make(path)
        monkeypatch.setattr(found, "set_num_threads", told.append)
        return found

    monkeypatch.setattr(dispatch, "NativeOps", made)
    dispatch.set_num_threads(1)
    assert told == []
    dispatch.describe()
    assert told == [1]


def test_what_is_switched_off_is_said(native: NativeOps, monkeypatch: pytest.MonkeyPatch) -> None:
    every = dispatch.describe()
    monkeypatch.setenv("DISAGG_KERNELS", "auto,-embed")
    assert dispatch.describe() == f"{every}, without embed (DISAGG_KERNELS)"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    arithmetic = dispatch.arithmetic(torch.bfloat16, "none", torch.device("cuda"))
    assert arithmetic == "cuda-9.0, without embed (DISAGG_KERNELS)"


def test_without_a_compiler_everything_works_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    x, weight = torch.randn(2, 48), torch.randn(48)
    q, cos = torch.randn(2, 3, 16), torch.randn(2, 16)
    cache, slots = torch.zeros(2, 1, 2, 3, 16, 16), torch.tensor([4, 5])
    keys, values = cache[:, 0, 0], cache[:, 0, 1]
    table, lens = torch.tensor([[0], [0]], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
    assert torch.equal(dispatch.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, _ = dispatch.add_rms_norm(x, x, weight, 1e-5)
    assert torch.equal(normed, reference.rms_norm(x + x, weight, 1e-5))
    assert torch.equal(dispatch.silu_mul(x), reference.silu_mul(x))
    qkv = torch.cat((q, q, q), dim=1).view(2, -1)
    rotated = dispatch.qkv_rope_write(
        qkv, torch.tensor([1, 0]), slots, RopeWrite(None, None, 0.0, cos, cos, keys, values)
    )
    assert torch.equal(rotated, reference.apply_rope(q, q, cos.flip(0), cos.flip(0))[0])
    assert torch.equal(cache[0, 0, :, :, 4], torch.stack((rotated[0], q[0])))
    assert torch.equal(dispatch.embed(slots, torch.eye(7)), torch.eye(7)[4:6])
    assert dispatch.argmax_rows(torch.eye(3), 3).tolist() == [0, 1, 2]
    form = AttentionForm(0.25)
    args = (q, keys, values, table, lens, form)
    assert torch.equal(dispatch.paged_decode_attention(*args), reference.paged_decode_attention(*args))
    out = dispatch.new_output((2, *q.shape), q)
    assert dispatch.paged_decode_attention(*args, out[0]).data_ptr() == out.data_ptr()
    prefills = prompts((table[0], 3, 2))
    spec = AttentionSpec(
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        num_heads=3,
        num_kv_heads=3,
        head_dim=16,
        block_size=16,
        scale=0.25,
    )
    assert dispatch.plan_prefills([ChunkPlace(0, 2, 3, 0)], spec) == {}
    dispatch.paged_prefill_attention(q, keys, values, prefills, form, out[1])
    assert torch.equal(out[0], reference.paged_decode_attention(*args))
    expected = torch.empty_like(out[1])
    assert torch.equal(out[1], reference.paged_prefill_attention(q, keys, values, prefills, form, expected))
    assert torch.equal(dispatch.take_rows(torch.eye(4), torch.tensor([3, 1])), torch.eye(4)[[3, 1]])
    assert dispatch.describe() == "torch reference (no C++ compiler on PATH (looked for c++, g++, clang++))"
    assert [(record.levelname, "no C++ compiler" in record.getMessage()) for record in caplog.records] == [
        ("WARNING", True)
    ]


def test_a_dtype_that_cpp_does_not_take_goes_to_the_reference_with_one_warning(
    native: NativeOps, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(2, 48).half(), torch.randn(48).half()
    for _ in range(2):
        assert torch.equal(dispatch.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["rms_norm: the kernel does not take these tensors (torch.float16); using the torch reference"]


# ---------------------------------------------------------------- building


@pytest.fixture
def compiler() -> str:
    try:
        return build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


def source(folder: Path, text: str) -> list[Path]:
    path = folder / "answer.cpp"
    path.write_text(text)
    return [path]


def test_a_library_is_built_once_and_found_again(compiler: str, tmp_path: Path) -> None:
    files, cache = source(tmp_path, ANSWER), tmp_path / "a" / "b"
    library = build.build(files, cache, compiler)
    assert ctypes.CDLL(str(library.path)).answer() == 42
    made = library.path.stat().st_ino
    assert build.build(files, cache, compiler) == library
    assert library.path.stat().st_ino == made
    assert sorted(path.name for path in cache.iterdir()) == [library.path.name, "lock"]


def test_workers_that_start_together_compile_once(
    compiler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "disagg.kernels.cpu.build")
    files = source(tmp_path, ANSWER)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: build.build(files, tmp_path / "cache", compiler), range(4)))
    assert len(set(made)) == 1
    assert len([record for record in caplog.records if "compiling" in record.getMessage()]) == 1


def test_a_library_that_is_there_is_found_while_another_one_is_compiled(compiler: str, tmp_path: Path) -> None:
    files = source(tmp_path, ANSWER)
    library = build.build(files, tmp_path, compiler)
    with (tmp_path / "lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = pool.submit(build.build, files, tmp_path, compiler)
        try:
            assert found.result(timeout=60) == library
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def test_another_source_is_another_library(compiler: str, tmp_path: Path) -> None:
    first = build.build(source(tmp_path, ANSWER), tmp_path / "cache", compiler)
    second = build.build(source(tmp_path, ANSWER.replace("42", "43")), tmp_path / "cache", compiler)
    assert first.path != second.path
    assert ctypes.CDLL(str(second.path)).answer() == 43


def test_a_failing_build_says_why_and_leaves_nothing(compiler: str, tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=r"answer\.cpp.*error") as caught:
        build.build(source(tmp_path, "int answer( {"), tmp_path / "cache", compiler)
    assert "failed with status 1" in str(caught.value)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_a_compiler_that_cannot_run_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="missing"):
        build.build(source(tmp_path, ANSWER), tmp_path / "cache", str(tmp_path / "missing"))


def test_a_cache_folder_that_cannot_be_made_is_a_build_error(compiler: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(build.BuildError, match="cache"):
        build.build(source(tmp_path, ANSWER), tmp_path / "cache", compiler)


def test_code_that_others_could_have_written_is_not_loaded(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cache = source(tmp_path, ANSWER), tmp_path / "cache"
    library = build.build(files, cache, compiler)
    assert (cache.stat().st_mode & 0o777, library.path.stat().st_mode & 0o777) == (0o700, 0o700)
    for spoil in (open_to_group, replace_by_link):
        library.path.write_bytes(b"another's")
        spoil(library.path, tmp_path)
        cache.chmod(0o777)
        assert build.build(files, cache, compiler) == library
        assert library.path.read_bytes().startswith(b"\x7fELF")
        assert (cache.stat().st_mode & 0o777, library.path.lstat().st_mode & 0o777) == (0o755, 0o700)
    owner = cache.stat().st_uid
    monkeypatch.setattr(build, "ROOT", owner + 2)
    monkeypatch.setattr("disagg.kernels.cpu.build.os.geteuid", lambda: owner + 1)
    with pytest.raises(build.BuildError, match=rf"belongs to another user \(uid {owner}\); set XDG_CACHE_HOME"):
        build.build(files, cache, compiler)


def open_to_group(library: Path, folder: Path) -> None:
    library.chmod(0o770)


def replace_by_link(library: Path, folder: Path) -> None:
    library.rename(folder / "elsewhere.so")
    library.symlink_to(folder / "elsewhere.so")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "disagg" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "disagg" / "kernels"


def test_sources_are_found_beside_the_builder() -> None:
    names = [path.name for path in build.sources()]
    assert names == sorted(names)
    assert {"attention.cpp", "elementwise.cpp", "vec.h"} <= set(names)
    assert all(os.access(path, os.R_OK) for path in build.sources())


# ---------------------------------------------------------------- made before


_, _, V4, V3, _ = build.LEVELS["x86_64"]


def test_libraries_for_levels_of_processors(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "sources", lambda: source(tmp_path, ANSWER))
    here = build.Level("some", ("-march=native",), "wide", frozenset({"fma"}))
    monkeypatch.setattr(build, "LEVELS", {"here": (here,)})
    (path,) = build.prebuild(tmp_path / "kernels", compiler, "here")
    library = build.find_prebuilt(tmp_path / "kernels", "here", frozenset({"fma", "more"}))
    assert library == build.Library(path, "wide (some)")
    assert ctypes.CDLL(str(library.path)).answer() == 42
    with pytest.raises(build.BuildError, match="no level of processors fits this here"):
        build.find_prebuilt(tmp_path / "kernels", "here", frozenset())
    with pytest.raises(build.BuildError, match="there are no levels of processors for pdp11; there are for here"):
        build.prebuild(tmp_path / "kernels", compiler, "pdp11")


def test_the_best_level_that_the_processor_has_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "sources", lambda: source(tmp_path, ANSWER))

    def put(level: build.Level) -> Path:
        path = build._prebuilt_path(tmp_path, level)
        path.write_bytes(level.name.encode())
        path.chmod(0o755)
        return path

    v3 = put(V3)
    assert build.find_prebuilt(tmp_path, "x86_64", V4.features).path == v3  # there is no better one
    v4 = put(V4)
    assert build.find_prebuilt(tmp_path, "x86_64", V4.features).path == v4
    assert build.find_prebuilt(tmp_path, "x86_64", V3.features).path == v3
    assert build.find_prebuilt(tmp_path, "x86_64", V4.features, V3).path == v3  # the one that was asked for
    v4.chmod(0o777)  # anybody could have written it
    assert build.find_prebuilt(tmp_path, "x86_64", V4.features).path == v3
    monkeypatch.setattr(build, "sources", lambda: source(tmp_path, ANSWER.replace("42", "43")))
    with pytest.raises(build.BuildError, match="has no library of these sources for x86-64-v4 or x86-64-v3 or x86-64"):
        build.find_prebuilt(tmp_path, "x86_64", V4.features)


def test_the_variable_chooses_what_was_made_before(tmp_path: Path) -> None:
    """No compiler is looked for then: an image has none."""
    with pytest.raises(build.BuildError, match=f"^{build.PREBUILT}: "):
        build.library({build.PREBUILT: str(tmp_path)})
