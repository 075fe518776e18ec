"""Adapters as names of models: found, listed, hashed, replaced, removed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from disagg.gateway.auth.auth import ANONYMOUS, AnonymousAccess, Caller
from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.gateway.models.served_models import ServedModels
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.adapters import version_with
from disagg.proto.block_hash import root_hash
from disagg.proto.control import AdapterList, AddAdapter, ControlRefused, ControlReply, ControlRequest, ServedAdapter
from disagg.proto.errors import AdapterRemovedError, ModelDeniedError, ModelNotFoundError
from disagg.proto.ids import RequestId
from disagg.proto.messages import Adapter
from disagg.router.api import Completion
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeRouter
from tests.support.http_app import TestApp, error_of

A, B = "a" * 64, "b" * 64


def adapter(name: str, fingerprint: str = A, model: str = "") -> ServedAdapter:
    return ServedAdapter(
        model=model, adapter=Adapter(name=name, path=f"{name}-lora", fingerprint=fingerprint), num_bytes=7
    )


class Gateway:
    def __init__(self) -> None:
        self.router = FakeRouter()
        config = GatewayConfig(models=(ModelSource(name="m", path="fake", prefix_root="m", max_model_len=100),))
        self.served = ServedModels(config, {"": self.router}, lambda: RequestId("r"))
        self.offload = Offload(1, inline_bytes=1, max_bytes=1, max_tenant_bytes=1)

    def begin(self) -> None:
        self.served.begin(self.offload, None)

    def names(self, caller: Caller = ANONYMOUS) -> list[str]:
        return [each.model.info.name for each in self.served.models.allowed(caller)]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.served.close()
    gateway.offload.close()


async def test_adapters_that_are_known_before_the_gateway_begins_are_served_from_its_first_request(
    gateway: Gateway,
) -> None:
    gateway.served.set_adapters([adapter("sql"), adapter("lost", model="none"), adapter("m")])
    gateway.begin()
    assert gateway.names() == ["m", "sql"]  # no model without a key, and a model's name is its own
    models = gateway.served.models
    assert (models.names, models.only) == (["m"], models.find(ANONYMOUS, "m"))
    found = models.find(ANONYMOUS, "sql")
    assert (found.adapter, found.base_name, found.model.info.name) == (adapter("sql").adapter, "m", "sql")
    assert models.find(ANONYMOUS, None).adapter is None
    assert set(gateway.served.batch_views) == {"m", "sql"}
    assert set(gateway.served.views) == {"m"}


async def test_rights_are_for_names_of_adapters_as_of_models(gateway: Gateway) -> None:
    gateway.begin()
    gateway.served.set_adapters([adapter("sql"), adapter("law")])
    limited = ANONYMOUS._replace(models=frozenset({"sql"}))
    assert gateway.names(limited) == ["sql"]
    assert gateway.served.models.find(limited, "sql").model.info.name == "sql"
    for name in ("m", "law"):
        with pytest.raises(ModelDeniedError):
            gateway.served.models.find(limited, name)
    with pytest.raises(ModelDeniedError):
        gateway.served.models.find(ANONYMOUS._replace(models=frozenset({"m"})), "sql")


async def test_only_what_changed_is_made_anew_and_the_end_of_a_name_ends_what_waits(gateway: Gateway) -> None:
    gateway.begin()
    gateway.served.set_adapters([adapter("sql"), adapter("law")])
    models = gateway.served.models
    sql, law = models.find(ANONYMOUS, "sql"), models.find(ANONYMOUS, "law")
    gateway.served.set_adapters([adapter("sql", B), adapter("law")])
    assert models.find(ANONYMOUS, "law") is law
    replaced = models.find(ANONYMOUS, "sql")
    assert replaced is not sql
    assert (sql.is_removed, gateway.router.removed_adapters) == (False, [])
    gateway.served.set_adapters([adapter("law")])
    assert gateway.router.removed_adapters == [adapter("sql", B).adapter]
    with pytest.raises(ModelNotFoundError, match=r"there is m, law$"):
        models.find(ANONYMOUS, "sql")
    gateway.served.withdraw("")
    assert gateway.names() == []
    gateway.served.restore("")
    assert gateway.names() == ["m", "law"]


async def test_an_error_lists_few_of_many_names(gateway: Gateway) -> None:
    gateway.begin()
    gateway.served.set_adapters([adapter(f"a{i}") for i in range(100)])
    with pytest.raises(ModelNotFoundError, match=r"a30, 69 more$"):
        gateway.served.models.find(ANONYMOUS, "none")


# ---------------------------------------------------------------- over HTTP


class Controller:
    """Takes every request but those in `refused`."""

    def __init__(self) -> None:
        self.asked: list[ControlRequest] = []
        self.refused: ControlRefused | None = None

    async def __call__(self, request: ControlRequest) -> ControlReply:
        self.asked.append(request)
        return self.refused or AdapterList(adapters=())


def app_with(model: ServedModel, caller: Caller = ANONYMOUS) -> tuple[TestApp, Controller]:
    controller = Controller()
    app = TestApp(model, authenticator=AnonymousAccess(caller), control=controller)
    app.models.set_adapters({"sql": app.generator.with_adapter(adapter("sql").adapter, 7)})
    app.router.script = lambda _: [[75]]
    return app, controller


async def test_every_answer_names_the_adapter_and_the_request_has_it(model: ServedModel) -> None:
    app, _ = app_with(model)
    responses = [
        await app.chat(model="sql"),
        await app.text(model="sql"),
        await app.client.post("/v1/responses", json={"model": "sql", "input": "hi"}),
        await app.client.post(
            "/v1/messages",
            json={"model": "sql", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
        ),
    ]
    assert [(each.status_code, each.json().get("model")) for each in responses] == [(200, "sql")] * 4
    for request, _ in app.router.submitted:
        assert (request.adapter, request.adapter_bytes) == (adapter("sql").adapter, 7)
        assert request.root_hash == root_hash(FINGERPRINT, b"", A)
    await app.chat()
    base = app.router.submitted[-1][0]
    assert (base.adapter, base.root_hash) == (None, root_hash(FINGERPRINT))


@pytest.mark.parametrize("content", [A, B])
async def test_a_stream_is_resumed_by_the_content_that_began_it(model: ServedModel, content: str) -> None:
    """Of another content the version is one that no worker has."""
    app, _ = app_with(model)
    app.router.script = lambda routed: [[75], [76], Completion("stop", 2, 0)]
    version = "0123456789abcdef"
    told = version_with(version, adapter("sql").adapter)
    now = adapter("sql", content)
    app.models.set_adapters({"sql": app.generator.with_adapter(now.adapter, 7)})
    await app.text(model="sql", stream=True, headers={"last-event-id": f"7.1.1.{told}"})
    routed = app.router.submitted[-1][0]
    assert (routed.model_version == version) == (content == A)
    assert version_with(routed.model_version, now.adapter) == told


async def test_models_are_listed_with_parents(model: ServedModel) -> None:
    app, _ = app_with(model)
    listed = (await app.client.get("/v1/models")).json()["data"]
    assert [(each["id"], each["parent"], each["root"]) for each in listed] == [
        (MODEL_NAME, None, MODEL_NAME),
        ("sql", MODEL_NAME, "sql-lora"),
    ]
    assert (await app.client.get("/v1/models/sql")).json() == listed[1]
    unknown = await app.chat(model="none")
    assert error_of(unknown) == (404, "model", "model_not_found")


async def test_a_prompt_that_is_tokenized_while_its_adapter_is_removed_is_refused(model: ServedModel) -> None:
    app, _ = app_with(model)
    app.models.adapters["sql"].is_removed = True  # after it was found
    response = await app.chat(model="sql")
    assert error_of(response)[::2] == (404, "adapter_removed")
    assert app.router.submitted == []
    assert AdapterRemovedError("sql").message in response.json()["error"]["message"]


async def test_admins_add_and_remove_adapters_as_with_vllm(model: ServedModel) -> None:
    app, controller = app_with(model)
    body = {"lora_name": "law", "lora_path": "law-lora"}
    added = await app.client.post("/v1/load_lora_adapter", json=body)
    assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'law' added successfully.")
    await app.client.post("/v1/load_lora_adapter", json={**body, "load_inplace": True})
    removed = await app.client.post("/v1/unload_lora_adapter", json={"lora_name": "law"})
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'law' removed successfully.")
    first, second, _ = controller.asked
    assert isinstance(first, AddAdapter)
    assert isinstance(second, AddAdapter)
    assert (first.name, first.path, first.replaces, second.replaces) == ("law", "law-lora", False, True)
    await app.client.post("/v1/load_lora_adapter", json={**body, "base_model_name": "llama"})
    last = controller.asked[-1]
    assert isinstance(last, AddAdapter)
    assert (first.base, last.base) == ("", "llama")
    missing = await app.client.post("/v1/load_lora_adapter", json={"lora_name": "law"})
    assert error_of(missing)[:2] == (400, "lora_path")
    controller.refused = ControlRefused(field="name", message="the adapter 'law' has already been loaded")
    assert error_of(await app.client.post("/v1/load_lora_adapter", json=body))[:2] == (400, "lora_name")
    controller.refused = ControlRefused(field="base", message="must be set, to one of a, b")
    assert error_of(await app.client.post("/v1/load_lora_adapter", json=body))[:2] == (400, "base_model_name")
    controller.refused = ControlRefused(field="name", message="'law' cannot be found", is_missing=True)
    assert (await app.client.post("/v1/unload_lora_adapter", json={"lora_name": "law"})).status_code == 404


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_ordinary_keys_add_and_remove_nothing(model: ServedModel, path: str) -> None:
    app, controller = app_with(model, Caller("a", False))
    assert error_of(await app.client.post(path, content=b"not JSON")) == (403, None, "permission_denied")
    assert controller.asked == []
    admin, controller = app_with(model, Caller("a", True, infers=False))
    body = {"lora_name": "law", "lora_path": "law-lora"}
    assert (await admin.client.post(path, json=body)).status_code == 200
    assert len(controller.asked) == 1
