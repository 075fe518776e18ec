"""FlashInfer's own signatures, read from its source where it is installed (no import, no GPU): what plays it in tests
(`tests/support/flashinfer_played.py`), which is strict about our calls, takes nothing that it does not take."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from tests.support.flashinfer_played import BatchPrefillWithPagedKVCacheWrapper as Played

FOUND = importlib.util.find_spec("flashinfer")
pytestmark = pytest.mark.skipif(FOUND is None, reason="flashinfer is not installed")


def real_arguments(method: str) -> dict[str, str | None]:
    """Of the last definition (the others are overloads): name -> default, None where it must be given."""
    assert FOUND is not None
    assert FOUND.origin is not None
    tree = ast.parse((Path(FOUND.origin).parent / "prefill.py").read_text(encoding="utf-8"))
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == Played.__name__)
    arguments = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == method][-1].args
    needed = [None] * (len(arguments.args) - len(arguments.defaults))
    defaults = [*needed, *map(ast.unparse, arguments.defaults)]
    found = {argument.arg: default for argument, default in zip(arguments.args, defaults, strict=True)}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[argument.arg] = None if default is None else ast.unparse(default)
    return found


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_what_is_played_has_the_real_parameters(method: str) -> None:
    real = real_arguments(method)
    played = inspect.signature(getattr(Played, method)).parameters
    assert list(played)[: len(real)] == [name for name in real if name in played]  # in the same order
    assert {name for name, default in real.items() if default is None} <= played.keys()


def test_the_defaults_that_we_leave() -> None:
    plan = real_arguments("plan")
    left = ("pos_encoding_mode", "window_left", "logits_soft_cap", "custom_mask", "o_data_type")
    assert [plan[name] for name in left] == ["'NONE'", "-1", "None", "None", "None"]
