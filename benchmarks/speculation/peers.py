"""Speculation of others beside ours, on the same copying requests: how many times their own plain tokens/s.

llama.cpp   `llama-lookup`, one request at a time in a process of its own, which says how long it decoded; plain where
            it may have no draft.
vLLM        its CPU build with n-gram speculation, and a second server without. Prompts are cached by a run before, so
            that the time is that of decoding.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from benchmarks.engine.llamacpp import open_llama_cpp
from benchmarks.load_http import only_model
from benchmarks.serving.vllm import serving_vllm
from benchmarks.speculation.cells import in_order
from benchmarks.speculation.requests import Request
from tests.support.pace import in_flight
from tests.support.reports import print_table

BATCHES = (1, 4, 8)
"""Batch sizes at which peers are measured."""
LLAMA_LOOKUP = "llama-lookup"
LLAMA_DRAFTS = 8
"""Most drafts of llama.cpp, as of ours."""
LLAMA_TIMEOUT_S = 120.0
VLLM_SPECULATION = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
"""Values of vLLM's documentation."""
VLLM_TIMEOUT_S = 600.0
_ENCODED = re.compile(r"encoded\s+(\d+) tokens")
_DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """Some requests of one run."""

    num_tokens: int
    seconds: float
    texts: tuple[str, ...] = ()
    """Answers, where the peer gives them."""

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


class Peer(Protocol):
    """An engine of others."""

    @property
    def name(self) -> str:
        """Name in figures."""
        ...

    @property
    def batches(self) -> Sequence[int]:
        """Batch sizes that it can do."""
        ...

    def run(self, requests: Sequence[Request], batch: int, *, speculates: bool) -> PeerRun:
        """Answer all requests, `batch` at a time."""
        ...


def measure(peer: Peer, requests: Sequence[Request], batches: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
    """Turns with speculation and without, the next one in the other order; a row for each."""
    for batch in [batch for batch in batches if batch in peer.batches]:
        for turn in range(turns):
            order = in_order(("plain", "speculation"), turn)
            found = {each: peer.run(requests, batch, speculates=each == "speculation") for each in order}
            plain, with_drafts = found["plain"], found["speculation"]
            yield {
                "peer": peer.name,
                "batch": batch,
                "turn": turn,
                "plain_tok_s": plain.tok_s,
                "speculation_tok_s": with_drafts.tok_s,
                "tokens": plain.num_tokens,
                "differing": sum(map(differ, plain.texts, with_drafts.texts)),
            }


def differ(one: str, other: str) -> bool:
    """Whether neither text begins the other: llama.cpp keeps accepted drafts beyond the limit and the end."""
    return not (one.startswith(other) or other.startswith(one))


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median over the turns of each peer's ratio at each batch size."""
    return {
        f"{peer}_copying_b{batch}": statistics.median(
            row["speculation_tok_s"] / row["plain_tok_s"]
            for row in rows
            if (row["peer"], row["batch"]) == (peer, batch)
        )
        for peer, batch in dict.fromkeys((row["peer"], row["batch"]) for row in rows)
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table; nothing without peers."""
    lines = []
    for name, ratio in summarize(rows).items():
        some = [row for row in rows if name == f"{row['peer']}_copying_b{row['batch']}"]
        medians = [statistics.median(row[each] for row in some) for each in ("plain_tok_s", "speculation_tok_s")]
        differing = sum(row["differing"] for row in some)
        lines.append(
            (some[0]["peer"], str(some[0]["batch"]), *(f"{m:.1f}" for m in medians), f"{ratio:.3f}", f"{differing}")
        )
    if lines:
        print_table("Peers", ("peer", "batch", "plain tok/s", "with drafts", "times", "differing"), lines)


# ---------------------------------------------------------------- llama.cpp


class LlamaLookup:
    """The program of llama.cpp in `folder`."""

    name = "llamacpp"
    batches = (1,)

    def __init__(self, folder: Path, texts: Mapping[str, str], num_threads: int) -> None:
        program = folder / LLAMA_LOOKUP
        if not program.is_file():
            raise ValueError(f"--llamacpp: {folder} has no {LLAMA_LOOKUP}; scripts/peers/llama_cpp.sh builds it")
        self._command = [str(program), "-m", str(open_llama_cpp(folder).gguf), "-t", str(num_threads)]
        self._texts = texts

    def run(self, requests: Sequence[Request], batch: int, *, speculates: bool) -> PeerRun:
        """Answer the requests one after the other.

        Raises:
            RuntimeError: the program fails, or its tokens of a prompt are not ours.
        """
        num_tokens, seconds = 0, 0.0
        texts = []
        for request in requests:
            text, decoded, seconds_of_one = self._answer(request, LLAMA_DRAFTS if speculates else 0)
            num_tokens, seconds = num_tokens + decoded, seconds + seconds_of_one
            texts.append(text)
        return PeerRun(num_tokens=num_tokens, seconds=seconds, texts=tuple(texts))

    def _answer(self, request: Request, num_drafts: int) -> tuple[str, int, float]:
        prompt = self._texts[request.name]
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(prompt + "\n")  # one end of line is taken from the end of a file
            file.flush()
            most = str(request.sampling.max_tokens - 1)  # it makes one more
            options = ["-f", file.name, "-n", most, "--temp", "0", "-c", "4096", "--no-escape"]
            drafts = ["--spec-draft-n-max", str(num_drafts)]
            done = subprocess.run(
                [*self._command, *options, *drafts], capture_output=True, text=True, errors="replace",
                timeout=LLAMA_TIMEOUT_S, check=False,
                env={**os.environ, "OMP_NUM_THREADS": self._command[-1]},
            )  # fmt: skip
        return parse_llama(done.stdout, done.stderr, prompt, len(request.prompt))


def parse_llama(output: str, log: str, prompt: str, num_prompt: int) -> tuple[str, int, float]:
    """The answer, which follows the prompt in the output, its tokens, and the seconds in which they were decoded.

    Raises:
        RuntimeError: the figures are not there, or the prompt has another number of tokens.
    """
    encoded, decoded = _ENCODED.search(log), _DECODED.search(log)
    if encoded is None or decoded is None:
        raise RuntimeError(f"{LLAMA_LOOKUP} gave no figures: {log[-1000:]}")
    if int(encoded[1]) != num_prompt:
        raise RuntimeError(f"{LLAMA_LOOKUP} made {encoded[1]} tokens of a prompt of {num_prompt}")
    return output.partition(prompt)[2].strip(), int(decoded[1]), float(decoded[2])


# ---------------------------------------------------------------- vLLM


class Vllm:
    """Two servers, one with n-gram speculation."""

    name = "vllm"
    batches = BATCHES

    def __init__(self, plain: str, speculating: str) -> None:
        self._addresses = {False: plain, True: speculating}
        self._models = {address: only_model(address) for address in self._addresses.values()}
        self._cached: set[tuple[str, str]] = set()

    def run(self, requests: Sequence[Request], batch: int, *, speculates: bool) -> PeerRun:
        """Answer the requests; prompts that are not cached are answered once before.

        Raises:
            RuntimeError: a request is not answered.
        """
        return asyncio.run(self._run(self._addresses[speculates], requests, batch))

    async def _run(self, address: str, requests: Sequence[Request], batch: int) -> PeerRun:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=VLLM_TIMEOUT_S, trust_env=False) as client:
            for request in requests:
                if (address, request.name) not in self._cached:
                    await self._ask(client, address, request, 1)
                    self._cached.add((address, request.name))
            found: dict[int, tuple[str, int]] = {}

            async def one(number: int) -> None:
                request = requests[number]
                found[number] = await self._ask(client, address, request, request.sampling.max_tokens)

            began = time.perf_counter()
            await in_flight(one, range(len(requests)), batch)
            seconds = time.perf_counter() - began
        texts, counts = zip(*(found[number] for number in range(len(requests))), strict=True)
        return PeerRun(num_tokens=sum(counts), seconds=seconds, texts=texts)

    async def _ask(self, client: httpx.AsyncClient, address: str, request: Request, most: int) -> tuple[str, int]:
        body = {
            "model": self._models[address],
            "prompt": list(request.prompt),
            "max_tokens": most,
            "temperature": 0,
        }
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"vLLM: status {reply.status_code}: {reply.text[:300]}")
        answer = reply.json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


@contextmanager
def serving_both(model_path: Path) -> Iterator[Vllm]:
    """Both servers, until the block ends. Raises `LaunchError`."""
    speculation = msgspec.json.encode(VLLM_SPECULATION).decode()
    with ExitStack() as stack:
        plain = stack.enter_context(serving_vllm(model_path))
        speculating = stack.enter_context(serving_vllm(model_path, ["--speculative-config", speculation]))
        yield Vllm(plain, speculating)
