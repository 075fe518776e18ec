"""A tenant that is forgotten is noted by the controller, for workers that do not run."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.gateway.operators.shell.admin import AdminService
from disagg.proto.block_hash import tenant_tag
from disagg.proto.control import ControlReply, ControlRequest, ControlState, ForgetRequest
from disagg.proto.errors import UnavailableError
from tests.support.gateway import FakeRouter

AUDIT: Any = None


async def test_the_controller_notes_the_tag_of_the_tenant() -> None:
    asked: list[ControlRequest] = []

    async def control(request: ControlRequest) -> ControlReply:
        asked.append(request)
        return ControlState(pools=(), workers=(), gateways=())

    await AdminService(FakeRouter(), control, audit=AUDIT)._note_forgotten("team-a")
    assert asked == [ForgetRequest(tenant_tag=tenant_tag("team-a"))]


async def test_an_operator_is_told_that_a_controller_did_not_note_it() -> None:
    async def away(request: ControlRequest) -> ControlReply:
        raise UnavailableError("the controller does not answer", "controller_away")

    with pytest.raises(UnavailableError, match=r"does not answer; workers that start later are not told: repeat this$"):
        await AdminService(FakeRouter(), away, audit=AUDIT)._note_forgotten("team-a")


async def test_a_gateway_without_a_controller_has_no_other_workers() -> None:
    router = FakeRouter()
    await AdminService(router, audit=AUDIT)._note_forgotten("team-a")
    assert router.forgotten == []
