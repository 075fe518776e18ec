"""`disagg chat` and `disagg top` in a terminal, on a real gateway whose answers follow a script."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from disagg.proto.ids import WorkerId
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import RequestTrace, RoutedRequest
from tests.support.architecture import REPOSITORY
from tests.support.gateway import EOS, FakeRouter, Step, Wait, write_checkpoint
from tests.support.gateway_server import running

WAIT_S = 120.0
AGAIN_S = 5.0
"""How long anything may take before a test fails."""
CTRL_C, CTRL_D = "\x03", "\x04"
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Program that makes standard input the terminal of its session, so that Ctrl-C there is a signal, and then runs
another one."""
DISAGG = (sys.executable, "-m", "disagg.cli")
CHAT = (*DISAGG, "chat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def environment(address: str) -> dict[str, str]:
    paths = f"{REPOSITORY / 'src'}:{REPOSITORY}"
    return {**os.environ, "PYTHONPATH": paths, "DISAGG_ADDRESS": address, "TERM": "dumb", "COLUMNS": "100"}


class Terminal:
    """A program in a terminal of its own: what it has shown, and the keys that are pressed."""

    def __init__(self, keys: int, reader: asyncio.StreamReader) -> None:
        self.keys = keys
        self._reader = reader
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    async def until(self, text: str, keys: str = "") -> str:
        """Wait for a text, and return all that was shown up to its end since the text before. `keys` are pressed, and
        again while it is not shown: `readline` overlooks a Ctrl-C between its prompt and its wait for a key."""
        self.press(keys)
        async with asyncio.timeout(WAIT_S):
            while text not in self.shown:
                try:
                    part = await asyncio.wait_for(self._reader.read(1 << 16), AGAIN_S if keys else None)
                except TimeoutError:
                    self.press(keys)
                    continue
                assert part, f"ended before {text!r}: {self.shown!r}"
                self.shown += part.decode().replace("\r", "")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    async def end(self) -> str:
        """What is still shown, up to the end of the program."""
        try:
            async with asyncio.timeout(WAIT_S):
                while part := await self._reader.read(1 << 16):
                    self.shown += part.decode().replace("\r", "")
        except OSError:  # Linux's way to say that the other end is closed
            pass
        return self.shown


@asynccontextmanager
async def terminal(*command: str, env: dict[str, str]) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    keys, screen = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        IN_TERMINAL,
        *command,
        stdin=screen,
        stdout=screen,
        stderr=screen,
        env=env,
        start_new_session=True,
    )
    os.close(screen)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(keys), "rb", 0)
    )
    try:
        yield Terminal(keys, reader), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        transport.close()
        os.close(keys)


async def test_a_conversation_in_a_terminal(folder: Path) -> None:
    def script(request: RoutedRequest) -> list[Step]:
        """The first answer never ends; the others are of two tokens."""
        return [answer("hello"), Wait()] if len(router.submitted) == 1 else [answer("the cat"), [EOS]]

    router = FakeRouter(script)
    async with running(folder, router) as server:
        tokenizer = server.models[""].tokenizer

        def answer(text: str) -> list[int]:
            return tokenizer.encode_text(text)[1:]

        def prompt() -> str:
            return tokenizer.decode(unpack_token_ids(router.submitted[-1][0].prompt_token_ids))

        async with terminal(*CHAT, env=environment(server.address)) as (screen, process):
            await screen.until("Ctrl-D or /bye leaves\n>>> ")
            screen.press("one\n")
            assert (await screen.until("hello")).startswith("one\n")
            screen.press(CTRL_C)
            await screen.until(">>> ")
            await asyncio.wait_for(router.handles[0].cancelled.wait(), WAIT_S)

            screen.press("/set temperature 0\n")
            await screen.until("temperature is 0.0\n>>> ")
            screen.press("two\n")
            await screen.until("the cat\n>>> ")
            assert "user\none" in prompt()
            assert "assistant\nhello" in prompt()
            assert "user\ntwo" in prompt()
            request = router.submitted[-1][0]
            assert request.sampling.temperature == 0.0

            router.traces[request.request_id] = RequestTrace(
                request_id=request.request_id, decode_worker=WorkerId("decode-0"), arrival=0.0, stages={}
            )
            screen.press("/explain\n")
            assert "ran on" in await screen.until("decode-0, prompt and answer")
            await screen.until(">>> ")

            await screen.until("Ctrl-D or /bye leaves\n>>> ", CTRL_C)  # at the prompt, too, it ends nothing
            screen.press(CTRL_D)
            assert "Traceback" not in await screen.end()
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_a_gateway_that_goes_away_is_one_line_and_the_conversation_goes_on(folder: Path) -> None:
    router = FakeRouter([[EOS]])
    async with running(folder, router) as server:
        address = server.address
        async with terminal(*CHAT, env=environment(address)) as (screen, _):
            await screen.until(">>> ")
            await server.stop(0.0)
            screen.press("one\n")
            shown = await screen.until(">>> ")
            assert shown.startswith(f"one\nerror: no gateway answers at {address}; start one with: ")
            assert shown.endswith(" up\n>>> ")
            screen.press("/show\n")
            assert "messages    0\n" in await screen.until(">>> ")


async def test_a_pipe_is_answered_once(folder: Path) -> None:
    router = FakeRouter(lambda request: [tokens, [EOS]])
    async with running(folder, router) as server:
        tokens = server.models[""].tokenizer.encode_text("the cat")[1:]
        process = await asyncio.create_subprocess_exec(
            *CHAT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(server.address),
        )
        out, errors = await asyncio.wait_for(process.communicate(b"hi\n"), WAIT_S)
    assert (out, errors, process.returncode) == (b"the cat\n", b"", 0)
    assert len(router.submitted) == 1


async def test_q_ends_top_and_leaves_the_terminal_as_it_was(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server:
        env = {**environment(server.address), "TERM": "xterm"}
        async with terminal(*DISAGG, "top", env=env) as (screen, process):
            before = termios.tcgetattr(screen.keys)
            await screen.until(server.address)
            screen.press("xq")
            assert "Traceback" not in await screen.end()
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
            assert termios.tcgetattr(screen.keys) == before
