"""What a tenant with limits reads of them over HTTP: real gateway and key file, the router's own counts, a clock that
stands still."""

from __future__ import annotations

from pathlib import Path

import httpx
from typing_extensions import override

from disagg.router.api import CallDemand, Quota, RoutedRequest, TenantLimits
from disagg.router.config import RouterConfig
from disagg.router.queueing.tenants import Tenants
from tests.support.gateway import FakeHandle, FakeRouter, write_checkpoint
from tests.support.gateway_server import running
from tests.support.http_app import TEXT

KEY_A, KEY_B = "key-of-tenant-a-0001", "key-of-tenant-b-0002"
KEYS = f"""
- {{tenant: a, key: {KEY_A}, limits: {{requests_per_minute: 6, tokens_per_minute: 100}}}}
- {{tenant: b, key: {KEY_B}}}
"""
PREFIX = "x-ratelimit-"


class MeteredRouter(FakeRouter):
    """Charges calls as the router core does. Nothing is given back at the end of an answer."""

    def __init__(self) -> None:
        super().__init__([[75]])
        self.tenants = Tenants(RouterConfig(), lambda: 4, lambda: (4096, 0))

    @override
    def admit(self, call: CallDemand) -> None:
        if (error := self.tenants.admit(call, 0, 0.0)) is not None:
            raise error

    @override
    def submit(self, request: RoutedRequest, arrival: float) -> FakeHandle:
        tenant = self.tenants.get(request.tenant, request.limits, 0.0)
        num_tokens = request.num_prompt_tokens + request.sampling.max_tokens
        self.tenants.charge(tenant, num_tokens, request.prepaid_tokens, 0.0)
        self.tenants.submitted(tenant)
        return super().submit(request, arrival)

    @override
    def remaining_quota(self, tenant: str, limits: TenantLimits) -> Quota:
        return self.tenants.remaining_quota(tenant, limits, 0.0)


def limits_in(response: httpx.Response) -> dict[str, str]:
    return {name.removeprefix(PREFIX): value for name, value in response.headers.items() if name.startswith(PREFIX)}


async def test_a_tenant_with_limits_reads_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    router = MeteredRouter()
    async with (
        running(write_checkpoint(tmp_path), router, api_keys=str(file), http_port=0) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60.0) as client,
    ):

        async def post(key: str, **changes: object) -> httpx.Response:
            body = {**TEXT, "prompt": [75, 76], "max_tokens": 8, **changes}
            return await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        whole, stream, other = await post(KEY_A), await post(KEY_A, stream=True, n=3), await post(KEY_B)
        over, much = await post(KEY_A, n=3), await post(KEY_A, max_tokens=80)
        wrong = await post(KEY_A, temperature=-1)
    assert [each.status_code for each in (whole, stream, other, over, much, wrong)] == [200, 200, 200, 429, 429, 400]
    assert limits_in(whole) == {
        "limit-requests": "6",
        "remaining-requests": "5",
        "reset-requests": "10s",
        "limit-tokens": "100",
        "remaining-tokens": "90",
        "reset-tokens": "6s",
    }
    after = {
        "limit-requests": "6",
        "remaining-requests": "2",
        "reset-requests": "40s",
        "limit-tokens": "100",
        "remaining-tokens": "60",
        "reset-tokens": "24s",
    }
    assert limits_in(stream) == limits_in(over) == limits_in(much) == limits_in(wrong) == after
    assert (over.headers["retry-after-ms"], over.json()["error"]["code"]) == ("10000", "rate_limit_exceeded")
    assert limits_in(other) == {}


async def test_the_other_apis_are_charged_and_refused_alike(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    async with (
        running(write_checkpoint(tmp_path), MeteredRouter(), api_keys=str(file), http_port=0) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60.0) as client,
    ):
        shared = {"model": TEXT["model"], "temperature": 0}
        response = {**shared, "input": "a", "max_output_tokens": 8}
        message = {**shared, "messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
        bearer, api_key = {"authorization": f"Bearer {KEY_A}"}, {"x-api-key": KEY_A}
        answered = [
            await client.post("/v1/responses", json=response, headers=bearer),
            await client.post("/v1/messages", json={**message, "stream": True}, headers=api_key),
        ]
        num_tokens = answered[0].json()["usage"]["input_tokens"] + 8
        counted = await client.post("/v1/messages/count_tokens", json=message, headers=api_key)
        refused = [
            await client.post("/v1/responses", json={**response, "max_output_tokens": 95}, headers=bearer),
            await client.post("/v1/messages", json={**message, "max_tokens": 95}, headers=api_key),
        ]
    assert [each.status_code for each in answered] == [200, 200]
    assert counted.json() == {"input_tokens": num_tokens - 8}
    left = [limits_in(each)["remaining-tokens"] for each in (*answered, *refused)]
    assert left == [str(100 - num_tokens), *[str(100 - 2 * num_tokens)] * 3]
    assert [limits_in(each)["remaining-requests"] for each in (*answered, *refused)] == ["5", "4", "4", "4"]
    assert [each.status_code for each in refused] == [429, 429]
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert refused[1].json()["error"]["type"] == "rate_limit_error"
    assert refused[0].headers["retry-after-ms"] == refused[1].headers["retry-after-ms"]
