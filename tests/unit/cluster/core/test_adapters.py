"""The registry of adapters: what a configuration names, what operators add, what is refused."""

from __future__ import annotations

import msgspec
import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.changes import compare
from disagg.cluster.core import adapters as registry
from disagg.cluster.core.adapters import Adapters, Base, Bases
from disagg.proto.control import AdapterRecord, AddAdapter, ControlRefused
from disagg.proto.errors import ConfigError

A, B = "a" * 64, "b" * 64
ONE = {"": Base("m", {}, "/adapters")}


def with_file(**models: str) -> Bases:
    return {"": Base("m", models, "/adapters")}


def added(adapters: Adapters, name: str, fingerprint: str = A, path: str = "") -> None:
    record = AdapterRecord(name=name, path=path or name, model="", folder="/adapters")
    adapters.ready(record, fingerprint, 10)


def shown(adapters: Adapters) -> dict[str, str]:
    return {each.adapter.name: each.adapter.fingerprint[0] for each in adapters.served}


def test_what_a_file_names_is_checked_and_then_served_until_it_is_gone() -> None:
    adapters = Adapters()
    assert adapters.follow(with_file(sql="sql-lora", law="law-lora"))
    assert not adapters.follow(with_file(sql="sql-lora", law="law-lora"))
    assert shown(adapters) == {}
    law, sql = adapters.to_check(failed=False)
    assert (sql.name, sql.path, sql.phase, sql.is_in_file) == ("sql", "sql-lora", "pending", True)
    adapters.ready(sql, A, 10)
    adapters.failed(law, "prefill-0: rank 128 is above max_rank 64")
    assert shown(adapters) == {"sql": "a"}
    assert adapters.to_check(failed=False) == []
    assert [each.name for each in adapters.to_check(failed=True)] == ["law"]
    assert adapters.follow(with_file(law="law-lora"))
    assert shown(adapters) == {}
    assert [each.name for each in adapters.records] == ["law"]


def test_another_path_is_served_once_it_is_checked_and_the_content_before_until_then() -> None:
    adapters = Adapters()
    adapters.follow(with_file(sql="one"))
    adapters.ready(adapters.to_check(failed=False)[0], A, 10)
    adapters.follow(with_file(sql="two"))
    (record,) = adapters.to_check(failed=False)
    assert (record.path, shown(adapters)) == ("two", {"sql": "a"})
    adapters.failed(record, "no")
    assert shown(adapters) == {"sql": "a"}
    adapters.ready(record, B, 10)
    assert shown(adapters) == {"sql": "b"}
    assert adapters.records[0].detail == ""


def test_those_of_operators_stay_while_their_model_takes_adapters() -> None:
    adapters = Adapters()
    added(adapters, "mine")
    assert not adapters.follow(with_file())
    assert adapters.follow(with_file(mine="mine"))  # the file has it now
    assert (adapters.records[0].is_in_file, shown(adapters)) == (True, {"mine": "a"})
    added(adapters, "other")
    assert adapters.follow({"": Base("other", {}, "/adapters")})  # a model has its name, and the file has no mine
    assert shown(adapters) == {}
    added(adapters, "other")
    assert adapters.follow({"": Base("m")})
    assert adapters.records == ()


def test_with_another_folder_all_are_checked_again_and_served_meanwhile() -> None:
    adapters = Adapters()
    added(adapters, "mine")
    assert adapters.follow({"": Base("m", {}, "/elsewhere")})
    assert [each.name for each in adapters.to_check(failed=False)] == ["mine"]
    assert shown(adapters) == {"mine": "a"}


def test_a_saved_registry_goes_on() -> None:
    adapters = Adapters()
    adapters.follow(with_file(sql="sql"))
    added(adapters, "mine")
    saved = msgspec.json.decode(msgspec.json.encode(adapters.records), type=tuple[AdapterRecord, ...])
    assert Adapters(saved).records == adapters.records


@pytest.mark.parametrize(
    ("request_", "bases", "field"),
    [
        (AddAdapter(name="", path="p"), ONE, "name"),
        (AddAdapter(name="m", path="p"), ONE, "name"),
        (AddAdapter(name="x", path="/p"), ONE, "path"),
        (AddAdapter(name="x", path="a/../../p"), ONE, "path"),
        (AddAdapter(name="x", path="p", base="n"), ONE, "base"),
        (AddAdapter(name="x", path="p"), {"": Base("m")}, "base"),
        (AddAdapter(name="x", path="p"), {"a": Base("m", {}), "b": Base("n", {})}, "base"),
        (AddAdapter(name="x", path="p", base="n"), {"a": Base("m", {}), "b": Base("n")}, "base"),
        (AddAdapter(name="old", path="p", replaces=False), ONE, "name"),
        (AddAdapter(name="in file", path="other"), with_file(**{"in file": "p"}), "path"),
        (AddAdapter(name="old", path="p", base="n"), {**ONE, "b": Base("n", {})}, "base"),
    ],
)
def test_what_cannot_be_added_is_refused_by_its_field(request_: AddAdapter, bases: Bases, field: str) -> None:
    adapters = Adapters()
    added(adapters, "old")
    adapters.follow(bases)
    found = adapters.find_base(request_, bases)
    assert isinstance(found, ControlRefused)
    assert found.field == field


def test_what_can_be_added() -> None:
    adapters = Adapters()
    added(adapters, "old")
    two = {"": Base("m", {}, "/adapters"), "b": Base("n")}
    assert adapters.find_base(AddAdapter(name="new", path="p"), two) == ""
    assert adapters.find_base(AddAdapter(name="old", path="other"), two) == ""
    assert adapters.find_base(AddAdapter(name="new", path="p", base="n"), {**two, "b": Base("n", {})}) == "b"
    adapters.follow(with_file(filed="p"))
    assert adapters.find_base(AddAdapter(name="filed", path="p"), with_file(filed="p")) == ""


def test_the_number_of_adapters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_ADAPTERS", 1)
    adapters = Adapters()
    added(adapters, "old")
    assert isinstance(adapters.find_base(AddAdapter(name="new", path="p"), ONE), ControlRefused)
    assert adapters.find_base(AddAdapter(name="old", path="p"), ONE) == ""


def test_what_can_be_removed() -> None:
    adapters = Adapters()
    adapters.follow(with_file(filed="p"))
    added(adapters, "mine")
    missing, filed = adapters.removal_refusal("none"), adapters.removal_refusal("filed")
    assert missing is not None
    assert missing.is_missing
    assert filed is not None
    assert not filed.is_missing
    assert adapters.removal_refusal("mine") is None
    adapters.remove("mine")
    assert shown(adapters) == {}


FOLDER = {"adapters": {"folder": "/adapters"}}


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ({"sql": "/etc"}, r"^adapters\.models\.sql: .*below adapters\.folder"),
        ({"sql": "a/../.."}, r"^adapters\.models\.sql: "),
        ({" sql": "a"}, r"^adapters\.models: the name of an adapter"),
        ({"m": "a"}, r"^adapters\.models\.m: m is a name already, by model\.name$"),
        ({f"a{i}": "p" for i in range(1025)}, r"^adapters\.models: at most 1024"),
    ],
)
def test_what_a_configuration_cannot_name(models: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config({"model": {"name": "m", "path": "fake"}, "adapters": {"folder": "/adapters", "models": models}})


def test_adapters_of_a_configuration_are_changed_in_place() -> None:
    before = parse_config({"adapters": {"folder": "/adapters", "models": {"sql": "one", "law": "law"}}})
    after = parse_config({"adapters": {"folder": "/adapters", "models": {"sql": "two", "new": "new"}}})
    assert {(change.field, change.how) for change in compare(before, after)} == {
        (f"adapters.models.{name}", "in place") for name in ("sql", "law", "new")
    }
