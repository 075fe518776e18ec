"""Whether two commits have the same code, wherever it lies: the proof of a commit that only moves files.

    python scripts/same_functions.py BEFORE [AFTER]

Compares the multisets of all functions, classes and assignments at the top of modules and classes, each by its name and
its syntax tree without imports, strings that name modules or paths, and docstrings of modules. Prints what only one of
the two has. Exit status 1 if there is anything.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator

_NAMES = re.compile(r"(?:disagg\.)?[a-z_]+(?:[./][a-z_0-9]+)+(?:\.py|/)?")
"""Dotted modules and paths within strings."""


def definitions(source: str) -> Iterator[str]:
    """Each definition of a module as text; those of a class also one by one."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [s for s in statements if not isinstance(s, ast.Import | ast.ImportFrom)])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = _NAMES.sub("NAME", node.value)
    if tree.body and isinstance(tree.body[0], ast.Expr):
        del tree.body[0]
    for statement in tree.body:
        yield ast.dump(statement)


def code_of(revision: str) -> Counter[str]:
    """All definitions of a commit's Python files."""
    archive = subprocess.run(["git", "archive", revision], capture_output=True, check=True).stdout
    found: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.isfile() and member.name.endswith(".py"):
                content = files.extractfile(member)
                found.update(definitions(content.read().decode()) if content else ())
    return found


def main() -> int:
    """Compare; the exit status."""
    before, after = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "HEAD"
    old, new = code_of(before), code_of(after)
    for sign, difference in (("-", old - new), ("+", new - old)):
        for text, count in difference.items():
            print(f"{sign} {count} x {text[:300]}")
    print(f"{old.total()} definitions before, {new.total()} after")
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
