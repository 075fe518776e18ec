"""Several prompts in one call, which guardrails look at before one runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from typing_extensions import override

from disagg.gateway.guardrails.config import GuardrailOptions, PythonOptions
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.guardrails.shell.judges import Judge
from disagg.gateway.requests.verdicts import Question, Verdict
from disagg.gateway.text.tokenizer import ServedModel
from tests.support.gateway import MODEL_NAME, FakeRouter
from tests.support.http_app import AsgiCall, TestApp


class Hanging(Judge):
    """Gives no verdict."""

    def __init__(self) -> None:
        self.asked, self.left = asyncio.Event(), asyncio.Event()

    @override
    async def judge(self, question: Question) -> Verdict:
        self.asked.set()
        try:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        finally:
            self.left.set()

    @override
    async def close(self) -> None:
        """Holds nothing."""


async def test_a_client_that_leaves_is_asked_about_no_more(model: ServedModel) -> None:
    options = GuardrailOptions(name="g", python=PythonOptions(object="builtins:len"), timeout_s=60.0)
    guardrails, judge = Guardrails([options]), Hanging()
    guardrails._asked["g"]._judge = judge
    app = TestApp(model, FakeRouter())
    app.completions.models.generators[0]._guardrails = guardrails
    fields: dict[str, Any] = {"model": MODEL_NAME, "prompt": ["a", "b"]}
    call = AsgiCall(app.app, "/v1/completions", json.dumps(fields).encode())
    await judge.asked.wait()
    call.leave()
    async with asyncio.timeout(5):
        await judge.left.wait()
        await call.task
    assert app.router.submitted == []
