"""Sampling settings as clients might send them, in either protocol: good ones, odd ones, and what no client means.

    Settings(rng).draw() ──> a body in JSON, or a protobuf message ──validation of the gateway──> Sampling, or the error

Numbers come from the edges of what is allowed and of what a number can be, as often as from within.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
from google.protobuf.message import Message

from disagg.gateway.openai.schema import CompletionBody, decode
from disagg.gateway.openai.to_input import read_completion
from disagg.gateway.requests.request import GenerationInput
from disagg.gateway.requests.validate import Limits, check_request, fit_prompt
from disagg.gateway.rpc.protobuf import read_request
from disagg.gateway.text.tokenizer import ModelInfo
from disagg.proto.messages import Sampling
from disagg.v1 import inference_pb2 as pb
from tests.support.reports import in_one_go

_FLOAT_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
_ODD_FLOATS = (
    "0", "-0.0", "1", "-1", "2", "-2", "100", "-100", "1e-5", "9.9e-6", "1e-7", "1e-38", "1e-45", "1e-46", "5e-324",
    "0.01", "0.0099999", "0.010000001", "0.5", "0.9999999", "1.0000001", "2.0000001", "1e3", "3.4e38", "3.5e38",
    "1e308", "1e309", "-1e308", "NaN", "Infinity", "-Infinity", "null", "true", '"1"', "[]",
)  # fmt: skip
_NOT_JSON = ("NaN", "Infinity", "-Infinity")
"""Python reads them all the same."""
_ODD_INTS = (
    "0", "1", "-1", "-2", "2", "7", "20", "21", "63", "64", "255", "256", "999", "1000", "1001", "2147483647",
    "2147483648", "4294967295", "9223372036854775807", "-9223372036854775808", "18446744073709551615",
    "18446744073709551616", "1" + "0" * 40, "1.0", "1.5", "null", "false", '"3"',
)  # fmt: skip
_INTS = {
    "top_k": (-1, 400),
    "seed": (0, (1 << 64) - 1),
    "logprobs": (0, 20),
    "max_tokens": (1, 6),
    "min_tokens": (0, 6),
}


class Settings:
    """A stream of settings for a model. `max_tokens` bounds how far an accepted one is run."""

    def __init__(self, rng: random.Random, model: ModelInfo) -> None:
        self._rng = rng
        self._limits = Limits(model, 1 << 20)
        self._bodies = msgspec.json.Decoder(CompletionBody)

    def draw(self, prompt: Sequence[int]) -> Sampling:
        """The next ones, as a worker would get them.

        Raises:
            InvalidRequestError: the gateway refuses them.
        """
        given = self._of_json(prompt) if self._rng.random() < 0.6 else self._of_protobuf(prompt)
        checked = check_request(given, self._limits)
        return fit_prompt(checked, prompt, self._limits, self._rng.getrandbits(64))

    # ------------------------------------------------------------ fields

    def _fields(self) -> dict[str, str]:
        """Some fields with their values as JSON writes them."""
        rng = self._rng
        names = [*_FLOAT_RANGES, *_INTS, "ignore_eos", "stop_token_ids", "logit_bias", "n", "stop"]
        fields = {}
        for name in rng.sample(names, rng.choice((0, 1, 1, 2, 2, 3, 4, 6, len(names)))):
            is_odd = rng.random() < 0.15
            if name in _FLOAT_RANGES:
                fields[name] = rng.choice(_ODD_FLOATS) if is_odd else self._float(name)
            elif name in _INTS:
                fields[name] = rng.choice(_ODD_INTS) if is_odd else str(rng.randint(*_INTS[name]))
            else:
                fields[name] = self._other(name, is_odd=is_odd)
        return fields

    def _float(self, name: str) -> str:
        low, high = _FLOAT_RANGES[name]
        kind = self._rng.randrange(4)
        if kind == 0:
            return repr(self._rng.choice((low, high, min(high, 1.0), min(high, 0.7))))
        return repr(self._rng.uniform(low, high if kind < 3 else min(high, 2.0)))

    def _other(self, name: str, *, is_odd: bool) -> str:
        rng, vocab_size = self._rng, self._limits.model.vocab_size
        match name:
            case "ignore_eos":
                return rng.choice(("true", "false"))
            case "n":
                return rng.choice(_ODD_INTS) if is_odd else "1"
            case "stop":
                return '["\\u0000"]' if is_odd else '["x", "y"]'
            case "stop_token_ids":
                count = rng.choice((0, 1, 8, 64, 65 if is_odd else 64))
                ids = [str(rng.randrange(vocab_size)) for _ in range(count)]
                return f"[{', '.join([*ids, rng.choice(_ODD_INTS)] if is_odd else ids)}]"
        values = (-100.0, 100.0, rng.uniform(-100, 100))
        biases = {rng.randrange(vocab_size): repr(rng.choice(values)) for _ in range(rng.choice((0, 1, 2, 50, 1024)))}
        if is_odd:
            biases[rng.choice((vocab_size, vocab_size - 1, 1 << 40))] = rng.choice(_ODD_FLOATS)
        return "{" + ", ".join(f'"{token_id}": {value}' for token_id, value in biases.items()) + "}"

    # ------------------------------------------------------------ the two protocols

    def _of_json(self, prompt: Sequence[int]) -> GenerationInput:
        fields = {name: value for name, value in self._fields().items() if value not in _NOT_JSON}
        text = ", ".join(f'"{name}": {value}' for name, value in fields.items())
        head = f'{{"model": "{self._limits.model.name}", "prompt": {list(prompt)}'
        body = decode(f"{head}, {text}}}".replace(", }", "}").encode(), self._bodies)
        return in_one_go(read_completion(body)).inputs[0]

    def _of_protobuf(self, prompt: Sequence[int]) -> GenerationInput:
        request = pb.GenerateRequest(model=self._limits.model.name, token_ids=pb.TokenIds(ids=prompt))
        for name, text in self._fields().items():
            message: Message = request.sampling if hasattr(request.sampling, name) else request.stopping
            _set(request if name == "n" else message, name, text)
        return in_one_go(read_request(request, self._limits.model))


def _set(message: Any, name: str, text: str) -> None:
    """Set a field to what JSON would hold, where a message of these types can hold it."""
    value = json.loads(text)
    try:
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            for key, each in value.items():
                getattr(message, name)[int(key)] = each
        else:
            setattr(message, name, value)
    except (AttributeError, TypeError, ValueError):
        return  # no client could send it in this protocol
