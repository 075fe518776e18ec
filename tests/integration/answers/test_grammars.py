"""Grammars of clients that end, exhaust or never leave the library that compiles them: refused, by the same process as
good ones, over each API. A real compiler process; a real gateway."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from disagg.client import AsyncClient
from disagg.gateway.answers.grammars.compiler import CompilerStart
from disagg.gateway.answers.grammars.compiler_process import CompilerProcess
from disagg.gateway.requests.request import GenerationInput, TextPrompt
from disagg.gateway.requests.structured import StructuredOutput, check_structured
from disagg.proto.errors import InvalidRequestError
from disagg.proto.grammars import grammar_tokenizer, new_matcher
from tests.acceptance.fuzz.grammar_cases import make_case
from tests.support.gateway import EOS, MODEL_NAME, VOCAB_SIZE, FakeRouter, tokenizer_json, write_checkpoint
from tests.support.gateway_server import running
from tests.support.processes import children_of
from tests.support.waiting import LONG_WAIT_S, until

if TYPE_CHECKING:
    from llguidance import LLMatcher

NUM_GENERATED = 400
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}}
CRASHING: tuple[dict[str, Any], ...] = (
    {"enum": [-9223372036854775808]},
    {"const": -9223372036854775807},
    {"type": "integer", "minimum": -9.3e18, "maximum": -9.3e18},
)
ROUNDED = {"enum": [9007199254740993]}
ENDLESS = {"type": "integer", "multipleOf": 10_000_019}


REFUSED = r": (cannot be used: |(%json: )?-?9\d+ cannot be kept exactly)"


def schema(value: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[CompilerProcess]:
    file = write_checkpoint(tmp_path) / "tokenizer.json"
    start = CompilerStart(tokenizer_file=str(file), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    made = CompilerProcess(start)
    yield made
    made.close()


def test_a_grammar_that_ends_the_library_ends_no_other(
    compiler: CompilerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    assert compiler.verdict(schema(GOOD)) == ""
    process = compiler.pid
    for value in CRASHING:
        assert compiler.verdict(schema(value)) == "cannot be used: the compiler of grammars fails on it (SIGSEGV)"
        assert compiler.verdict(schema(GOOD)) == ""
    assert "Invalid type" in compiler.verdict(schema({"type": "nothing"}))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(compiler.verdict, [schema(value) for value in (*CRASHING, GOOD) * 8]))
    assert [wrong == "" for wrong in found] == [False, False, False, True] * 8
    assert compiler.pid == process
    (line,) = [record.getMessage() for record in caplog.records]  # once a minute
    assert line.startswith("grammars of clients ended their compilers, 1 since the last such line")


def test_one_without_end_ends_at_its_deadline_while_others_are_compiled(compiler: CompilerProcess) -> None:
    with ThreadPoolExecutor(2) as threads:
        endless = [threads.submit(compiler.verdict, schema({**ENDLESS, "$comment": str(i)})) for i in range(2)]
        assert compiler.verdict(schema(GOOD)) == ""
    assert {one.result() for one in endless} == {"cannot be used: it takes more than 100 ms of a processor to compile"}
    assert compiler.verdict(schema(GOOD)) == ""


def test_a_process_that_is_killed_is_started_again_and_none_outlives_its_owner(compiler: CompilerProcess) -> None:
    assert compiler.verdict(schema(GOOD)) == ""
    first = compiler.pid
    assert first is not None
    children = children_of(first)
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    until(lambda: children[0] not in children_of(first), "the process does not notice that its child was killed")
    assert compiler.verdict(schema({**GOOD, "title": "again"})) == ""
    children = children_of(first)
    os.kill(first, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "children outlive their process")
    assert compiler.verdict(schema(GOOD)) == ""
    assert compiler.pid != first


def bodies(value: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each way over HTTP, by the field that an error names."""
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    arguments = {"type": "object", "properties": {"a": value}}
    function = {"type": "function", "function": {"name": "f", "parameters": arguments}}
    flat = {"type": "function", "name": "f", "parameters": arguments}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}
    form = {"type": "json_schema", "name": "n", "schema": value}
    return {
        "response_format.json_schema.schema": ("/v1/chat/completions", {**chat, "response_format": asked}),
        "structured_outputs.json": ("/v1/chat/completions", {**chat, "structured_outputs": {"json": value}}),
        "structured_outputs.grammar": (
            "/v1/completions",
            {
                "model": MODEL_NAME,
                "prompt": "a",
                "structured_outputs": {"grammar": f"start: %json {json.dumps(value)}"},
            },
        ),
        "tools[0].function.parameters": (
            "/v1/chat/completions",
            {**chat, "tools": [function], "tool_choice": "required"},
        ),
        "text.format.schema": (
            "/v1/responses",
            {"model": MODEL_NAME, "input": "a", "text": {"format": form}},
        ),
        "tools[0].parameters": (
            "/v1/responses",
            {"model": MODEL_NAME, "input": "a", "tools": [flat], "tool_choice": "required"},
        ),
        "output_config.format.schema": (
            "/v1/messages",
            {**chat, "output_config": {"format": {"type": "json_schema", "schema": value}}},
        ),
        "tools[0].input_schema": (
            "/v1/messages",
            {**chat, "tools": [{"name": "f", "input_schema": arguments}], "tool_choice": {"type": "any"}},
        ),
    }


@pytest.mark.parametrize("value", [*CRASHING, ENDLESS, ROUNDED])
async def test_over_each_api_such_a_grammar_is_an_error_that_names_its_field(
    value: dict[str, Any], tmp_path: Path
) -> None:
    async with running(write_checkpoint(tmp_path), FakeRouter([[5]]), http_port=0) as server:
        async with httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60.0) as http:
            for field, (path, body) in bodies(value).items():
                reply = await http.post(path, json=body)
                assert (field, reply.status_code) == (field, 400)
                error = reply.json()["error"]["message"]
                assert error.startswith(field)
                assert re.search(REFUSED, error)
        async with AsyncClient(server.address) as client:
            with pytest.raises(InvalidRequestError, match=rf"^structured\.json_schema.*{REFUSED}"):
                await client.generate("a", json_schema=value)
            assert (await client.generate("a", max_tokens=1)).token_ids == (5,)


def test_generated_ones_get_a_verdict_and_what_is_taken_does_a_worker_no_harm(compiler: CompilerProcess) -> None:
    """`make fuzz` does it with more of them, in a cluster."""
    vocabulary = grammar_tokenizer(tokenizer_json(), VOCAB_SIZE, (EOS,), "nonce")
    assert compiler.verdict(schema(GOOD)) == ""
    process, num_taken = compiler.pid, 0
    for number in range(NUM_GENERATED):
        case = make_case(number)
        text = case.value if isinstance(case.value, str) else json.dumps(case.value)
        asked = GenerationInput(
            model=MODEL_NAME, prompt=TextPrompt("a"), structured=StructuredOutput(case.kind, text, "field")
        )
        try:
            grammar = check_structured(asked)
        except InvalidRequestError:
            continue
        wrong = compiler.verdict(grammar)
        assert wrong == "" or wrong.startswith("cannot be used: ")
        if not wrong:
            num_taken += 1
            walk(new_matcher(vocabulary, grammar), random.Random(number))
    assert compiler.pid == process
    assert num_taken > NUM_GENERATED / 5


def walk(matcher: LLMatcher, dice: random.Random) -> None:
    """Some tokens of an answer, drawn from those that are allowed."""
    for _ in range(8):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(VOCAB_SIZE) if mask >> token_id & 1]
        if matcher.is_error() or not allowed or not matcher.consume_tokens([dice.choice(allowed)]):
            return
        matcher.compute_ff_tokens()


SUCCESSOR = """
import os, select, signal, socket
from disagg.gateway.answers.grammars.compiler import _Compiler

control, ours = socket.socketpair()
compiler = _Compiler(control, "no vocabulary")
while os.dup(0) % 8 != 6:  # a set then has the descriptor of the process before that of its jobs
    pass
compiler._fork()
(child,) = set(compiler._children.values())
child.num_done = 1
os.kill(child.pid, signal.SIGKILL)
watch = select.poll()
watch.register(child.pidfd, select.POLLIN)
watch.poll()
before = set(compiler._children)
compiler._hear(before)
(successor,) = set(compiler._children.values())
print(set(compiler._children) == before, successor is not child, compiler._idle == [successor])
"""


def test_a_compiler_with_the_descriptors_of_an_ended_one_is_not_taken_for_it() -> None:
    """One that is idle says nothing, and the process would wait for it for ever."""
    done = subprocess.run(
        [sys.executable, "-c", SUCCESSOR], capture_output=True, text=True, timeout=LONG_WAIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr
