"""Reads the source of the repository and reports where it breaks the rules of docs/architecture.md.

Nothing is imported, only parsed.

A rule is a function (path, source or tree) -> findings; a finding is one line that starts with `path:line`.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]

FOLDERS = (
    "autoscaler",
    "cluster",
    "connections",
    "decode_worker",
    "engine",
    "gateway",
    "kernels",
    "loadtests",
    "prefill_worker",
    "proto",
    "router",
    "step_times",
    "simulator",
)
"""The code folders, each linked into src/disagg under its own name."""

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "autoscaler": frozenset({"step_times", "proto"}),
    "cli": frozenset(
        {
            "step_times",
            "connections",
            "autoscaler",
            "cluster",
            "gateway",
            "router",
            "engine",
            "proto",
            "client",
            "loadtests",
            "simulator",
        }
    ),
    "cluster": frozenset(
        {
            "step_times",
            "connections",
            "autoscaler",
            "gateway",
            "router",
            "prefill_worker",
            "decode_worker",
            "engine",
            "proto",
        }
    ),
    "prefill_worker": frozenset({"connections", "engine", "proto"}),
    "decode_worker": frozenset({"connections", "engine", "proto"}),
    "gateway": frozenset({"connections", "router", "proto", "v1"}),
    "router": frozenset({"step_times", "connections", "proto"}),
    "engine": frozenset({"step_times", "connections", "kernels", "proto"}),
    "loadtests": frozenset({"cluster", "proto", "v1", "client"}),
    "simulator": frozenset({"step_times", "autoscaler", "router", "engine", "loadtests", "proto"}),
    "kernels": frozenset(),
    "connections": frozenset({"proto"}),
    "step_times": frozenset({"proto"}),
    "proto": frozenset(),
    "client": frozenset({"connections", "proto", "v1"}),
}
"""Which part of `disagg` may import which other; `v1` are the public stubs, `cli` and `client` are in src/disagg/."""

GATEWAY_FLOORS = (
    ("server", "security", "app", "stores"),
    ("openapi",),
    ("operators", "batches"),
    ("other_apis", "rpc"),
    ("openai",),
    ("calls",),
    ("models",),
    ("answers",),
    ("metrics", "usage"),
    ("config",),
    ("guardrails", "http"),
    ("requests",),
    ("text", "auth", "event_loop", "status", "readiness", "sqlite", "private_files"),
)
"""The rooms of the gateway, from top to bottom: each may import those below it, and of its own floor those that
`GATEWAY_NEIGHBOURS` names."""

GATEWAY_NEIGHBOURS = frozenset(
    {("server", "app"), ("server", "security"), ("event_loop", "auth"), ("sqlite", "private_files")}
)

FRONT_ENDS = ("openai", "other_apis", "rpc", "batches")
"""The rooms of the gateway that read what a client sent and write what it gets."""

PARTS_OF_A_CALL = (
    "disagg.gateway.requests.charge",
    "disagg.gateway.guardrails",
    "disagg.gateway.usage",
    "disagg.gateway.metrics",
    "disagg.gateway.readiness",
)
"""What a call takes and gives back, which front ends leave to `gateway/calls.py`."""

DOORS: Mapping[str, tuple[str, ...]] = {
    "ray": ("cluster/on_ray/*",),
    "triton": ("kernels/*",),
    "starlette": ("gateway/app.py", "gateway/http/*"),
    "uvicorn": ("gateway/http/*",),
    "httptools": ("gateway/http/*", "gateway/guardrails/shell/service.py"),
    "re2": ("gateway/guardrails/scanner.py", "engine/checkpoint/formats/names.py"),
    "python_multipart": ("gateway/batches/upload.py",),
    "locust": tuple(f"loadtests/generator/{name}.py" for name in ("locustfile", "run", "web_page")),
    "matplotlib": ("loadtests/verdict/plots.py",),
    "opentelemetry": ("router/shell/tracing.py",),
    "pyarrow": ("src/disagg/cli/planning/perf_tables.py",),
    "torch": (
        "kernels/*",
        "engine/checkpoint/convert.py",
        "engine/checkpoint/formats/reader.py",
        "engine/checkpoint/weight_file.py",
        "engine/io/rendezvous.py",
        "engine/kv_transfer/transports/gloo.py",
        "engine/kv_transfer/transports/nccl.py",
        "engine/kv_transfer/transports/nixl_agent.py",
        "engine/runner/*",
    ),
    "transformers": ("engine/checkpoint/*", "src/disagg/cli/*", "cluster/*"),
    "grpc": (
        "*/server.py",
        "*/service.py",
        "connections/*",
        "gateway/*",
        "router/shell/worker_link.py",
        "cluster/control/*_link.py",
        "cluster/on_ray/joined.py",
        "loadtests/generator/*",
        "src/disagg/client/*",
    ),
    "prometheus_client": ("gateway/metrics/*",),
    "grpc_health": ("*/server.py", "gateway/*", "src/disagg/client/*"),
    "grpc_reflection": ("*/server.py", "gateway/*"),
    "grpc_status": (
        "*/server.py",
        "*/service.py",
        "gateway/*",
        "src/disagg/client/*",
    ),
}
"""Foreign packages that only some files may import. `*` also matches deeper folders."""

IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "grpc",
        "multiprocessing",
        "queue",
        "random",
        "ray",
        "secrets",
        "select",
        "selectors",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "torch",
        "transformers",
        "triton",
        "uuid",
    }
)
"""What a pure module must not reach: time, randomness and ids are arguments; threads and sockets are its shell's."""

UNSAFE_LOADERS = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
"""Loaders that run code from their input."""

CODE_RUNNERS = frozenset({"eval", "exec", "yaml.full_load", "yaml.unsafe_load", "builtins.eval", "builtins.exec"})
"""Calls that run, or make objects of, whatever text they are given."""

IMPORT_CALLS = ("import_module", "__import__")

MAX_PACKAGE_MODULES = 15
"""One folder without its sub-folders and its `__init__`."""
MAX_FILE_LINES = 500
MAX_TEST_FILE_LINES = 700
"""Tests are read one at a time."""
MAX_FUNCTION_LINES = 80
"""Beyond these numbers `make lint` prints a hint."""


class Import(NamedTuple):
    """One imported module (or `module.name`, which may be a module) and where."""

    name: str
    line: int

    @property
    def root(self) -> str:
        """The top-level package."""
        return self.name.split(".")[0]


def source_files(*tops: str) -> list[str]:
    """The hand-written Python files below these folders, as sorted repository paths; generated stubs are left out."""
    found = (path for top in tops for path in (REPOSITORY / top).rglob("*.py"))
    return sorted(
        path.relative_to(REPOSITORY).as_posix() for path in found if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


def read(path: str) -> str:
    """The text of a file of the repository."""
    return (REPOSITORY / path).read_text(encoding="utf-8")


@functools.cache
def module_name(path: str) -> str:
    """`engine/core/steps.py` -> `disagg.engine.core.steps`; `src/disagg/client/wire.py` -> `disagg.client.wire`."""
    parts = PurePosixPath(path.removeprefix("src/disagg/")).with_suffix("").parts
    return ".".join(("disagg", *(part for part in parts if part != "__init__")))


def part_of(path: str) -> str:
    """The folder whose rules hold for a file, or `client` for the client."""
    return module_name(path).split(".")[1]


@functools.cache
def imports(path: str, source: str) -> tuple[Import, ...]:
    """Every import of a file, wherever it stands, also `importlib.import_module("...")` with a literal.

    `from a import b` counts as `a` and `a.b`; relative imports are made absolute.
    """
    return tuple(found for node in _nodes(source) for found in _imports_of(node, path))


@functools.cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """Those that some rule is about. The garbage collector would take three times as long as parsing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return tuple(node for node in _walk(ast.parse(source)) if isinstance(node, _LOOKED_AT))
    finally:
        if was_enabled:
            gc.enable()


def _walk(root: ast.AST) -> list[ast.AST]:
    """What `ast.walk` gives, in its order and in a third of its time, without leaves that no rule is about."""
    found = [root]
    for node in found:
        for value in vars(node).values():
            children = value if type(value) is list else (value,)
            found += [child for child in children if isinstance(child, ast.AST) and type(child) not in _LEAVES]
    return found


_LEAVES = frozenset({ast.Constant, ast.Load, ast.Name, ast.Store, ast.alias})


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c` and of `c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _imports_of(node: ast.AST, path: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, path)
        yield Import(base, node.lineno)
        yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
    elif isinstance(node, ast.Call) and _last_name(node.func) in IMPORT_CALLS and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield Import(name.value, node.lineno)


def _absolute(node: ast.ImportFrom, path: str) -> str:
    if node.level == 0:
        return node.module or ""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    kept = package[: len(package) - (node.level - 1)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def matches(path: str, globs: Iterable[str]) -> bool:
    """Whether a path matches one of the globs; `*` crosses folders."""
    return any(fnmatchcase(path, glob) for glob in globs)


# ---------------------------------------------------------------- rules


def folder_findings(path: str, source: str) -> list[str]:
    """Imports between our own folders that the map does not allow."""
    own = part_of(path)
    allowed = MAY_IMPORT[own] | {own, "__version__"}
    found = []
    for name, line in imports(path, source):
        parts = name.split(".")
        if parts[0] == "disagg" and len(parts) > 1 and parts[1] not in allowed:
            found.append(f"{path}:{line}: {own} may not import disagg.{parts[1]}")
    return sorted(set(found))


def floor_findings(path: str, source: str) -> list[str]:
    """Imports of a room of the gateway that is not below the importing one."""
    floor_of = {room: floor for floor, rooms in enumerate(GATEWAY_FLOORS) for room in rooms}
    parts = module_name(path).split(".")
    if parts[1:2] != ["gateway"] or len(parts) < 3:
        return []
    own = parts[2]
    found = []
    for name, line in imports(path, source):
        room = name.removeprefix("disagg.gateway.").split(".")[0]
        if not name.startswith("disagg.gateway.") or room == own or (own, room) in GATEWAY_NEIGHBOURS:
            continue
        if own not in floor_of or room not in floor_of:
            found.append(f"{path}:{line}: {own} or {room} is on no floor of the gateway")
        elif floor_of[room] <= floor_of[own]:
            found.append(f"{path}:{line}: {own} may not import {room}, which is not below it")
    return sorted(set(found))


def front_end_findings(path: str, source: str) -> list[str]:
    """Front ends of the gateway that import what a call takes and gives back: `gateway/calls.py` does that for them."""
    if not matches(path, [f"gateway/{room}/*" for room in FRONT_ENDS]):
        return []
    found = [
        f"{path}:{i.line}: a front end may not import {part}, but gateway/calls.py"
        for i in imports(path, source)
        for part in PARTS_OF_A_CALL
        if i.name == part or i.name.startswith(f"{part}.")
    ]
    return sorted(set(found))


def bare_name_findings(path: str, source: str) -> list[str]:
    """`import router...` instead of `import disagg.router...`: a second copy of the module, or another project's."""
    return [
        f"{path}:{i.line}: import disagg.{i.name}, not {i.name}" for i in imports(path, source) if i.root in FOLDERS
    ]


def door_findings(path: str, source: str) -> list[str]:
    """Foreign packages outside the files that may import them."""
    found = [
        f"{path}:{i.line}: {i.root} may only be imported in {', '.join(DOORS[i.root])}"
        for i in imports(path, source)
        if i.root in DOORS and not matches(path, DOORS[i.root])
    ]
    return sorted(set(found))


def loader_findings(path: str, source: str) -> list[str]:
    """What runs code from a file or a peer: pickle and its kin, `torch.load`, numpy's `allow_pickle`, `eval`."""
    found = [f"{path}:{i.line}: {i.root} runs code" for i in imports(path, source) if i.root in UNSAFE_LOADERS]
    found += [f"{path}:{i.line}: torch.load runs code" for i in imports(path, source) if i.name == "torch.load"]
    for node in _nodes(source):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) == "torch.load":
            found.append(f"{path}:{node.lineno}: torch.load runs code")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(f"{path}:{node.value.lineno}: allow_pickle runs code")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CODE_RUNNERS:
            found.append(f"{path}:{node.lineno}: {ast.unparse(node.func)} runs code")
    return sorted(set(found))


def docstring_findings(path: str, source: str) -> list[str]:
    """Docstrings without content: a mere pointer (`See X`, `As X.`), or no word beside those of the name.

    An implementation of an interface's member has `@override`, and a docstring only for what is special about it.
    """
    found = []
    for node, owner in _documented(source):
        text = " ".join((ast.get_docstring(node) or "").split())
        if not text:
            continue
        name = "" if isinstance(node, ast.Module) else node.name
        line = 1 if isinstance(node, ast.Module) else node.lineno
        if _POINTER.match(text):
            found.append(f"{path}:{line}: the docstring of {name or 'the module'} only points elsewhere")
        elif name and _words(text) <= _words(name) | _words(owner):
            found.append(f"{path}:{line}: the docstring of {name} only repeats the name")
    return sorted(found)


def _documented(
    source: str,
) -> Iterator[tuple[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """What may have a docstring, with the class that it is in."""
    for node in _nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef):
            if isinstance(node, ast.Module):
                yield node, ""
            owner = node.name if isinstance(node, ast.ClassDef) else ""
            yield from ((n, owner) for n in node.body if isinstance(n, _DEFINITIONS))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((n, "") for n in _walk(node) if n is not node and isinstance(n, _DEFINITIONS))


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LOOKED_AT = (*_DEFINITIONS, ast.Module, ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.keyword)
_POINTER = re.compile(r"See |(?:As|Like|Same as|Cf\.) (?:in )?`?[\w.]+`?[.;:]?$")
_EMPTY_WORDS = frozenset(
    {
        "a",
        "all",
        "an",
        "and",
        "are",
        "for",
        "in",
        "is",
        "it",
        "its",
        "of",
        "return",
        "returns",
        "that",
        "the",
        "their",
        "these",
        "this",
        "those",
        "to",
    }
)


def _words(text: str) -> set[str]:
    """In lower case and singular, without `_EMPTY_WORDS`; `PairTransport` is two words."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", text)}
    return {word.rstrip("s") for word in words - _EMPTY_WORDS}


def size_findings(path: str, source: str, max_file_lines: int = MAX_FILE_LINES) -> list[str]:
    """Files and functions that have grown too long to be read in one go."""
    found = []
    num_lines = len(source.splitlines())
    if num_lines > max_file_lines:
        found.append(f"{path}:1: {num_lines} lines, at most {max_file_lines}")
    for node in _nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def impurity_findings(path: str, sources: Mapping[str, str]) -> list[str]:
    """What a pure module reaches that it must not, directly or through modules of ours (`sources`: path -> text)."""
    path_of = {module_name(other): other for other in sources}
    found: list[str] = []
    seen = {path}
    todo = [path]
    while todo:
        current = todo.pop()
        via = "" if current == path else f" (imported by {path})"
        for imported in imports(current, sources[current]):
            if imported.root in IMPURE:
                found.append(f"{current}:{imported.line}: {imported.root} in a pure module{via}")
            elif imported.name.startswith("numpy.random"):
                found.append(f"{current}:{imported.line}: numpy.random in a pure module{via}")
            target = path_of.get(imported.name)
            if target is not None and target not in seen:
                seen.add(target)
                todo.append(target)
        found += [
            f"{current}:{line}: numpy.random in a pure module{via}" for line in _numpy_random_lines(sources[current])
        ]
    return sorted(set(found))


def import_cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Groups of modules that import each other, also over others and inside functions (`sources`: path -> text)."""
    path_of = {module_name(other): other for other in sources if not other.endswith("__init__.py")}
    graph = {
        path: {path_of[found.name] for found in imports(path, text) if found.name in path_of} - {path}
        for path, text in sources.items()
    }
    reached = {path: _reachable(path, graph) for path in graph}
    groups = {tuple(sorted(other for other in seen if path in reached[other])) for path, seen in reached.items()}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reachable(path: str, graph: Mapping[str, Iterable[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [path]
    while todo:
        for target in graph[todo.pop()]:
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


@functools.cache
def _numpy_random_lines(source: str) -> list[int]:
    spellings = ("np.random", "numpy.random")
    attributes = (node for node in _nodes(source) if isinstance(node, ast.Attribute) and node.attr == "random")
    return [node.lineno for node in attributes if ast.unparse(node) in spellings]


def package_findings(paths: Iterable[str]) -> list[str]:
    """Folders of many modules, or of one or two."""
    counts = Counter(str(PurePosixPath(path).parent) for path in paths if not path.endswith("__init__.py"))
    return [
        f"{package}: {count} modules, {'at most ' + str(MAX_PACKAGE_MODULES) if count > 2 else 'is it a folder?'}"
        for package, count in sorted(counts.items())
        if count > MAX_PACKAGE_MODULES or (count <= 2 and "/" in package)
    ]


def main() -> None:
    """Print hints on long files and functions, and on folders of many modules or few; they fail nothing."""
    for line in package_findings(source_files(*FOLDERS, "benchmarks")):
        print(f"hint: {line}")
    for path in source_files(*FOLDERS, "src/disagg", "tests", "benchmarks"):
        is_test = path.startswith(("tests/", "benchmarks/"))
        for line in size_findings(path, read(path), MAX_TEST_FILE_LINES if is_test else MAX_FILE_LINES):
            print(f"hint: {line}")


if __name__ == "__main__":
    main()
