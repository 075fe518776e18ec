import pytest

from disagg.proto.services import AUDIT, SESSION, TRANSFER, WATCH, service_and_method


def test_paths_name_their_service_and_method() -> None:
    assert [service_and_method(path) for path in (SESSION, WATCH, AUDIT, TRANSFER)] == [
        ("disagg.internal.Worker", "Session"),
        ("disagg.internal.Worker", "Watch"),
        ("disagg.internal.Worker", "Audit"),
        ("disagg.internal.Transfer", "Pair"),
    ]


@pytest.mark.parametrize("path", ["", "/", "a/b", "/a", "/a/", "//b"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ValueError, match="not a gRPC method path"):
        service_and_method(path)
