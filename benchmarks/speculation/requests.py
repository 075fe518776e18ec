"""The requests of the benchmark: prompts made of texts of this repository, in the chat form of the default model.

copying   what a text is edited, quoted or put into another form for; chosen by its plain answer (copying.py)
chat      questions about anything, drawn
hostile   see hostile.py
kinds     copying prompts with each way to choose tokens: greedy, drawn, penalties, a grammar, logprobs
"""

from __future__ import annotations

import ast
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from disagg.proto.messages import Sampling

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
DOCUMENTS = ("docs/architecture.md", "docs/how-a-request-is-served.md", "docs/faults.md", "docs/deployment.md")
SOURCES = ("engine/core/policy.py", "engine/text_counts.py", "engine/core/admission.py", "proto/block_hash.py",
           "engine/batch_arrays.py", "engine/core/forced.py", "proto/token_ids.py", "engine/randomness.py")  # fmt: skip
LENGTHS = (200, 900)
"""Characters of a text, least and most."""
DRAWN: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95}
TEXT_GRAMMAR = {"lark_grammar": r"start: /[A-Za-z0-9 ,.'\"()\n-]{1,400}/"}
"""A grammar that leaves most tokens of a plain text to the model."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.6},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.05, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "min_tokens": {"temperature": 0.0, "min_tokens": 48},
    "grammar": {"temperature": 0.0, "grammar": TEXT_GRAMMAR},
    "drawn grammar": {"temperature": 0.6, "grammar": TEXT_GRAMMAR},
}
"""Fields of `Sampling` by the name of the kind; a grammar is a JSON value here."""
TOPICS = (
    "bread", "the moon", "a small garden", "rivers", "chess", "old bridges", "bicycles", "winter", "honey bees",
    "paper", "trains", "the violin", "volcanoes", "tea", "lighthouses", "clouds",
)  # fmt: skip
QUESTIONS = (
    "Tell me something surprising about {}.",
    "Write a short story about {}.",
    "Explain {} to a child.",
    "What should I know about {} before I begin with it?",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, before its KV is computed."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling


def chat_text(question: str) -> str:
    """A question in the form in which the default model was trained."""
    turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    return f"{turns}<|im_start|>assistant\n"


# ---------------------------------------------------------------- copying


def paragraphs(markdown: str) -> list[str]:
    """Paragraphs of prose whose lengths are in `LENGTHS`, each on one line and without links."""
    least, most = LENGTHS
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    joined = [" ".join(part.split()) for part in re.split(r"\n\s*\n", plain)]
    return [text for text in joined if least <= len(text) <= most and text[0].isalpha()]


def functions(source: str) -> list[str]:
    """Functions of a module whose lengths are in `LENGTHS`, without what decorates them."""
    least, most = LENGTHS
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    parts = [ast.get_source_segment(source, node, padded=True) for node in sorted(found, key=lambda node: node.lineno)]
    texts = [textwrap.dedent(part or "") for part in parts]
    return [text for text in texts if least <= len(text) <= most]


def records(markdown: str) -> list[str]:
    """The rows of each table, some at a time, as JSON on one line."""
    least, most = LENGTHS
    texts = []
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        names, _, *rows = [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for first in range(0, len(rows), 3):
            text = json.dumps([dict(zip(names, row, strict=False)) for row in rows[first : first + 3]])
            texts += [text] if least <= len(text) <= most else []
    return texts


def prose_questions(text: str) -> Iterator[tuple[str, str]]:
    """Names and texts of what may be asked about a paragraph."""
    words = sorted(set(re.findall(r"[a-z]{6,}", text)), key=lambda word: (-text.count(word), word))
    yield "quotes", f"Summarize the text below. Quote its most important sentences word by word.\n\n{text}"
    yield "repeat", f"Repeat the following text exactly.\n\n{text}"
    if words:
        word = words[0]
        yield "replace", f'Repeat the following text, but replace "{word}" with "{word[::-1]}".\n\n{text}'


def code_questions(text: str) -> Iterator[tuple[str, str]]:
    """Names and texts of what may be asked about a function."""
    name = text.split("(")[0].split()[-1]
    fenced = f"```python\n{text}\n```"
    yield "rename", f"Rename the function `{name}` to `{name}_of` and print the whole code again.\n\n{fenced}"
    yield "comment", f"Print this code again with a comment above each line.\n\n{fenced}"


def json_questions(text: str) -> Iterator[tuple[str, str]]:
    """Names and texts of what may be asked about records."""
    yield "indent", f"Format this JSON with one field on each line.\n\n```json\n{text}\n```"
    yield "lines", f"Print each object of this JSON list on a line of its own.\n\n```json\n{text}\n```"


def copying_questions(folder: Path) -> list[tuple[str, str]]:
    """Names and questions from the texts of the repository at `folder`: those of the three sorts in turn."""
    documents = [(folder / path).read_text(encoding="utf-8") for path in DOCUMENTS]
    sources = [(folder / path).read_text(encoding="utf-8") for path in SOURCES]
    sorts = (
        [asked for document in documents for text in paragraphs(document) for asked in prose_questions(text)],
        [asked for source in sources for text in functions(source) for asked in code_questions(text)],
        [asked for document in documents for text in records(document) for asked in json_questions(text)],
    )
    return in_turn(sorts)


def in_turn(lists: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Entries of several lists, one of each in turn, until all are at their end."""
    longest = max(map(len, lists), default=0)
    return [each[at] for at in range(longest) for each in lists if at < len(each)]


# ---------------------------------------------------------------- chat, and ways to choose tokens


def chat_questions() -> list[str]:
    """Questions about anything, in an order that is the same each time."""
    found = [question.format(topic) for question, topic in product(QUESTIONS, TOPICS)]
    random.Random(0).shuffle(found)
    return found


def sampling_of(given: Mapping[str, Any], *, seed: int, max_tokens: int, ends: Sequence[int]) -> Sampling:
    """The sampling parameters of `DRAWN`, or of one of `KINDS`."""
    fields = dict(given)
    if "grammar" in fields:
        fields["grammar"] = msgspec.json.encode({"grammars": [fields["grammar"]]}).decode()
    return Sampling(seed=seed, max_tokens=max_tokens, stop_token_ids=tuple(ends), **fields)


Tokenize = Callable[[str], Sequence[int]]


def asked(
    questions: Sequence[tuple[str, str]], tokenize: Tokenize, sampling: Callable[[int], Sampling]
) -> list[Request]:
    """Requests for named questions; `sampling` is given the number of the request."""
    return [
        Request(name=f"{name} {number}", prompt=tuple(tokenize(chat_text(text))), sampling=sampling(number))
        for number, (name, text) in enumerate(questions)
    ]
