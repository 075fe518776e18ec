"""What the documents say is there: links, named files, commands, make targets, configuration."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

import pytest
import typer.main
import yaml

from disagg.cli.main import app
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.config.core_layout import check_devices
from disagg.proto.errors import ConfigError
from tests.support.architecture import FOLDERS, REPOSITORY

DOCUMENTS = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for pattern in ("*.md", "benchmarks/*.md", "tests/**/*.md", "docs/**/*.md", "deploy/**/*.md", "examples/*.md")
    for path in REPOSITORY.glob(pattern)
)
MAP = "docs/architecture.md"
PROGRAMS = {"benchmarks": "benchmarks/README.md", "tests.acceptance": "tests/acceptance/README.md"}
"""The table of each folder of programs that measure."""
BENCHMARK_PROCESSES = {"benchmarks.engine.process", "benchmarks.transfer.worker"}
"""Programs that benchmarks start."""
TREES = (*FOLDERS, "benchmarks", "deploy", "docs", "examples", "scripts", "src/disagg", "tests")


@cache
def read(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


@cache
def file_names() -> frozenset[str]:
    """Every source file by its path, and by each end of its path."""
    names: set[str] = set()
    for tree in TREES:
        for path in (REPOSITORY / tree).rglob("*"):
            parts = path.relative_to(REPOSITORY).parts
            names |= {"/".join(parts[first:]) for first in range(len(parts))}
    return frozenset(names)


def anchors(text: str) -> set[str]:
    """The anchors that headings get."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: str, text: str) -> list[str]:
    """Targets of relative links that are not there."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (REPOSITORY / path).parent / name if name else REPOSITORY / path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            found.append(target)
    return found


def missing_files(text: str) -> list[str]:
    """Names of Python and protobuf files that no source file has. `*` stands for any characters."""
    named = re.findall(r"(?<![\w./*<-])[\w./*-]+\.(?:py|proto)(?!\w)", text)
    return [name for name in named if not _is_known(name)]


@cache
def _is_known(name: str) -> bool:
    if "*" not in name:
        return name in file_names()
    return any(map(_pattern(name).fullmatch, file_names()))


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, name.split("*"))))


def code_blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_findings(text: str) -> list[str]:
    """`disagg ...` lines with a sub-command or an option that the command line does not have."""
    return [
        line
        for block in code_blocks(text)
        for line in re.findall(r"^(?:\S*/)?disagg [^#\n]*", block, re.MULTILINE)
        if not _is_command(line.split("disagg ", 1)[1].split())
    ]


def _is_command(words: list[str]) -> bool:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return False
        command, words = command.commands[words[0]], words[1:]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return all(word.split("=")[0] in options for word in words if word.startswith("-"))


def benchmark_findings(text: str) -> list[str]:
    """Benchmarks that are named after `python -m`, or quoted, and cannot be run."""
    named = re.findall(r"(?:python -m |[`\"])((?:benchmarks|tests\.acceptance)(?:\.[a-z]\w*)+)(?![\w/.])", text)
    return [name for name in named if name not in benchmark_programs()]


@cache
def benchmark_programs() -> frozenset[str]:
    """Every module of `PROGRAMS` that runs its `main` when it is started, and every package that has one."""
    found = set()
    for path in (path for top in PROGRAMS for path in (REPOSITORY / top.replace(".", "/")).rglob("*.py")):
        if _calls_main(ast.parse(path.read_text(encoding="utf-8"))):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__main__"))
    return frozenset(found)


def _calls_main(module: ast.Module) -> bool:
    """Whether it has, or imports from a file that has, a `main`, and ends with a call of it when it is run."""
    last = module.body[-1]
    if not (isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"):
        return False
    if ast.unparse(last.body[-1]) not in ("main()", "sys.exit(main())"):
        return False
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == "main" for alias in node.names):
            source = (REPOSITORY / node.module.replace(".", "/")).with_suffix(".py")
            return source.exists() and _has_main(ast.parse(source.read_text(encoding="utf-8")))
    return _has_main(module)


def _has_main(module: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.MULTILINE))


def test_there_are_documents() -> None:
    assert {"README.md", "CONTRIBUTING.md", MAP, "docs/glossary.md", "docs/deployment.md"} <= set(DOCUMENTS)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_somewhere(path: str) -> None:
    assert broken_links(path, read(path)) == []


@pytest.mark.parametrize("path", DOCUMENTS)
def test_named_files_exist(path: str) -> None:
    assert missing_files(read(path)) == []


@pytest.mark.parametrize("path", DOCUMENTS)
def test_shown_commands_exist(path: str) -> None:
    assert command_findings(read(path)) == []


@pytest.mark.parametrize("path", [*DOCUMENTS, "Makefile", "scripts/gpu_check.py", "benchmarks/gpu/contact/sections.py"])
def test_named_benchmarks_can_be_run(path: str) -> None:
    assert benchmark_findings(read(path)) == []


@pytest.mark.parametrize(("folder", "table"), PROGRAMS.items())
def test_every_benchmark_is_in_the_table(folder: str, table: str) -> None:
    row = rf"^\| [^|]+ \| `python -m ({re.escape(folder)}[\w.]+)[^`|]*` \| [^|]+ \|$"
    programs = {name for name in benchmark_programs() if name.startswith(f"{folder}.")}
    others = {name for name in programs if name.startswith("benchmarks.gpu.")} | BENCHMARK_PROCESSES
    assert set(re.findall(row, read(table), re.MULTILINE)) == programs - others


def test_every_code_folder_is_on_the_map() -> None:
    house = code_blocks(read(MAP))[0]
    lines = [line.split()[0] for line in house.splitlines() if line and not line.startswith(" ")]
    assert set(lines) >= {f"{top}/" for top in (*FOLDERS, "src/disagg", "tests", "benchmarks", "deploy")}


def test_decisions_are_numbered_without_a_gap_but_for_those_that_became_notes() -> None:
    moved = re.findall(r"^\| (\d+|–) \| \[[^\]]+\]\(([\w-]+\.md)\) \|$", read("docs/notes/README.md"), re.MULTILINE)
    assert {name for _, name in moved} == {path.name for path in (REPOSITORY / "docs/notes").iterdir()} - {"README.md"}
    files = sorted(path.name for path in (REPOSITORY / "docs" / "adr").glob("0*.md"))
    numbers = [int(name[:4]) for name in files]
    taken = sorted(numbers + [int(number) for number, _ in moved if number != "–"])
    assert taken == list(range(1, len(taken) + 1))
    titles = [read(f"docs/adr/{name}").splitlines()[0] for name in files]
    assert [title.split(" ")[:2] for title in titles] == [["#", f"{number}."] for number in numbers]


def test_every_decision_is_in_the_index_once() -> None:
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", read("docs/adr/README.md"))
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "docs" / "adr").glob("0*.md"))


def test_a_decision_has_context_decision_and_consequences() -> None:
    for path in DOCUMENTS:
        if path.startswith("docs/adr/0"):
            parts = re.findall(r"^\*\*(Context|Decision|Consequences)\.\*\*", read(path), re.MULTILINE)
            assert parts == ["Context", "Decision", "Consequences"], path


def test_make_targets_are_explained() -> None:
    recipes = read("CONTRIBUTING.md").split("## Before you write")[0]
    assert set(re.findall(r"`make ([a-z-]+)`", recipes)) == make_targets() - {"help"}


def test_documents_hold_no_json_of_measurements() -> None:
    """Reports have the figures; the files that they were made from once had 98,622 lines."""
    assert [path.name for path in (REPOSITORY / "docs").rglob("*.json*")] == []


def test_every_benchmark_report_is_in_the_index() -> None:
    index = set(re.findall(r"\]\(([\w-]+\.md)", read("docs/benchmarks/README.md")))
    assert index == {path.name for path in (REPOSITORY / "docs/benchmarks").iterdir()} - {"README.md"}


def test_shown_configurations_are_valid() -> None:
    for path in ("README.md", "docs/deployment.md"):
        shown = code_blocks(read(path), "yaml")
        assert shown, path
        for block in shown:
            parse_config(yaml.safe_load(block))


def test_the_configurations_of_the_first_hour_fit_one_gpu() -> None:
    shown = re.findall(r"cat > \S+\.yaml <<'END'\n(.*?)\nEND", read("docs/first-hour-on-a-gpu.md"), re.DOTALL)
    assert len(shown) == 2
    for block in shown:
        check_devices(parse_config(yaml.safe_load(block)), 1)
    pools = yaml.safe_load(shown[1])["pools"]
    two = {"pools": {name: pool | {"device": "cuda"} for name, pool in pools.items()}}
    check_devices(parse_config(two), 2)


def test_words_are_explained_once() -> None:
    words = [
        word.strip()
        for row in re.findall(r"^\| ([^|]+) \|", read("docs/glossary.md"), re.MULTILINE)
        if row != "word"
        for word in row.split(",")
    ]
    assert [word for word in words if words.count(word) > 1] == []


# ---------------------------------------------------------------- the checks themselves


def test_planted_faults_are_found() -> None:
    assert broken_links(MAP, "[a](adr/9999-none.md) [b](glossary.md) [c](#processes) [d](#nowhere)") == [
        "adr/9999-none.md",
        "#nowhere",
    ]
    assert missing_files("`router/api.py`, session.py and `engine/nothing.py`; cluster/on_ray/*.py, x_*.py") == [
        "engine/nothing.py",
        "x_*.py",
    ]
    lines = "```\ndisagg up --port 0\ndisagg fly\ndisagg load run --wings 2\n.venv/bin/disagg status # now\n```\n"
    assert command_findings(lines) == ["disagg fly", "disagg load run --wings 2"]
    good = "python -m benchmarks.router --part x; `benchmarks.engine.commits --turns 2`, `benchmarks/load.py`"
    assert benchmark_findings(f"{good}, `benchmarks.engine.rig`; python -m benchmarks.kernels --json x") == [
        "benchmarks.engine.rig",
        "benchmarks.kernels",
    ]
    with pytest.raises(ConfigError, match=r"pools\.prefil"):
        parse_config({"pools": {"prefil": {}}})
