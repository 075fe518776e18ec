"""Lines follow the models that a gateway serves."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from disagg.gateway.batches.batch_quota import BatchQuota
from disagg.gateway.batches.lines import NO_MODEL
from disagg.gateway.batches.service import BatchService
from disagg.gateway.batches.upload import FormWriter, receive_file
from disagg.gateway.config import BatchOptions
from disagg.proto.errors import InvalidRequestError, LimitError, OverloadedError
from disagg.proto.messages import Load
from disagg.router.api import ClusterView, WorkerView
from tests.support.router import worker_info


def _view(num_places: int) -> ClusterView:
    info = msgspec.structs.replace(worker_info("w"), roles=("prefill", "decode"), max_num_seqs=num_places)
    return ClusterView((WorkerView(info, Load()),), 0, 0)


def _service(
    folder: Path, views: Mapping[str, Callable[[], ClusterView]] | None = None, **options: int
) -> BatchService:
    given = BatchOptions(folder=str(folder), **options)
    return BatchService(given, "gateway", "1", views or {}, wakes_workers=False, ttft_s=None, tpot_s=None)


def test_models_that_come_have_room_of_their_own_and_lines_for_those_that_go_end_at_once(tmp_path: Path) -> None:
    views: dict[str, Callable[[], ClusterView]] = {"b": lambda: _view(20), "a": lambda: _view(30)}
    service = _service(tmp_path, views, max_running=100)
    assert service.models() == ["b", "a"]
    assert [service.batch_quota(model, 0, 90).num_answers for model in (0, 1, NO_MODEL)] == [10, 10, 10]
    del views["b"]
    views["new"] = lambda: _view(40)
    assert service.models() == ["b", "a", "new"]
    assert service.batch_quota(0, 3, 5) == BatchQuota(
        95, 95
    )  # ends at once, with the error of a model that is not served
    assert [service.batch_quota(model, 0, 0).num_answers for model in (1, 2)] == [27, 36]
    views["b"] = lambda: _view(10)
    assert service.models() == ["b", "a", "new"]
    assert service.batch_quota(0, 0, 0).num_answers == 9
    assert service.batch_quota(NO_MODEL, 0, 101) == BatchQuota(0, 0)
    service.close()


async def test_uploads_of_some_tenants_take_no_place_of_another(tmp_path: Path) -> None:
    """However slowly they come: each has four at a time, and its bytes from their beginning."""
    service = _service(tmp_path, max_total_bytes=1000)
    async with AsyncExitStack() as stack:
        for tenant in "abc":
            for number in range(4):
                await stack.enter_async_context(service.uploading(tenant, f"{tenant}{number}", 10))
        with pytest.raises(OverloadedError, match="4 files of tenant a arrive already"):
            await stack.enter_async_context(service.uploading("a", "a4", 10))
        with pytest.raises(LimitError, match="room for 440 bytes more of tenant d"):
            await stack.enter_async_context(service.uploading("d", "d0", 441))
        path = await stack.enter_async_context(service.uploading("d", "d1", 440))
        path.write_bytes(b"x")
        assert len(await service.call(lambda store: store.uploads(0.0))) == 13
    assert await service.call(lambda store: store.uploads(0.0)) == set()
    assert list(service.uploads.iterdir()) == []
    async with service.uploading("a", "a5", 500):
        pass
    service.close()


async def test_files_are_removed_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long for large ones, and every stream of the gateway would wait."""
    unlink, threads = Path.unlink, list[int]()

    def note(path: Path, missing_ok: bool = False) -> None:
        threads.append(threading.get_ident())
        unlink(path, missing_ok=missing_ok)

    async def parts() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        raise InvalidRequestError("body", "is cut off")

    service = _service(tmp_path)
    monkeypatch.setattr(Path, "unlink", note)
    async with service.uploading("a", "u", 9) as path:
        path.write_bytes(b"x")
    with pytest.raises(InvalidRequestError, match="cut off"):
        await receive_file(FormWriter("multipart/form-data; boundary=b", 9), parts(), tmp_path / "v")
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert not (tmp_path / "v").exists()
    service.close()
