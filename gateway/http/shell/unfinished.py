"""Reading of bodies under one budget of bytes: `BodyBudget` decides, this ends the readers that it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from disagg.gateway.http.body_budget import RETRY_AFTER_S, Body, BodyBudget
from disagg.proto.errors import OverloadedError


class UnfinishedBodies:
    """All incomplete bodies of one gateway. Used by one event loop."""

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self._deadlines: dict[Body, asyncio.Timeout] = {}

    @asynccontextmanager
    async def reading(self, tenant: str, timeout_s: float) -> AsyncGenerator[Callable[[int], None], None]:
        """Count a body of `tenant` while it is read inside. Yields a function to call with the size of each part.

        Raises:
            TimeoutError: after `timeout_s`.
            OverloadedError: if this body is given up for others.
        """
        body = self.budget.start(tenant)
        given_up = False

        def received(num_bytes: int) -> None:
            nonlocal given_up
            for refused in self.budget.received(body, num_bytes):
                deadline = self._deadlines.pop(refused)
                if refused is body:
                    given_up = True
                else:
                    deadline.reschedule(asyncio.get_running_loop().time())
            if given_up:
                raise self._refusal()

        try:
            async with asyncio.timeout(timeout_s) as deadline:
                self._deadlines[body] = deadline
                yield received
        except TimeoutError:
            if body not in self._deadlines:
                raise self._refusal() from None
            raise
        finally:
            self._deadlines.pop(body, None)
            self.budget.finish(body)

    def _refusal(self) -> OverloadedError:
        return OverloadedError(
            f"bodies that have not arrived completely hold all of their {self.budget.max_bytes} bytes "
            "(gateway.max_unfinished_bytes), and this one was given up",
            RETRY_AFTER_S,
        )
