"""Replace the legacy calls of a code base whose replacement is certain, and leave the others to their remarks."""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from namedmesh.migrate.scan import Finding, Scan

_MESH = "namedmesh.current_mesh()"


class Rewritten:
    """A file before and after.

    Args:
        path: the file.
        before: its bytes.
        after: what they become.
    """

    def __init__(self, path: str, before: bytes, after: bytes) -> None:
        self.path, self.before, self.after = path, before, after

    def diff(self) -> str:
        """Return the difference as ``patch`` takes it."""
        encoding = tokenize.detect_encoding(io.BytesIO(self.before).readline)[0]
        before, after = (
            side.decode(encoding).splitlines(keepends=True) for side in (self.before, self.after)
        )
        lines = difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


def is_certain(finding: Finding) -> bool:
    """Return whether a use can be replaced in place: a call that imports determine, without statements or remarks.

    What it needs besides, a mesh, is the one that ``namedmesh.current_mesh()`` returns.
    """
    return (
        finding.certain
        and finding.end is not None
        and "mesh." in finding.replacement
        and not (finding.once or finding.notes)
        and "mesh" not in finding.legacy  # an argument of that name would be taken for ours
    )


def rewrite(scan: Scan) -> list[Rewritten]:
    """Return the files with every certain use replaced, and ``import namedmesh`` where they had none."""
    findings = [finding for finding in scan.findings if is_certain(finding)]
    rewritten = [
        _rewrite(path, list(own)) for path, own in groupby(findings, key=lambda finding: finding.path)
    ]
    return [one for one in rewritten if one.after != one.before]


def write(rewritten: Rewritten) -> str:
    """Write a file, and keep what it was beside it; return the path of that.

    Raises:
        OSError: one of them cannot be written; the file is as it was then, or the backup holds it.
    """
    backup, number = Path(f"{rewritten.path}.orig"), 0
    while backup.exists():
        number += 1
        backup = Path(f"{rewritten.path}.orig.{number}")
    backup.write_bytes(rewritten.before)
    Path(rewritten.path).write_bytes(rewritten.after)
    return str(backup)


def _rewrite(path: str, findings: Sequence[Finding]) -> Rewritten:
    before = Path(path).read_bytes()
    encoding = tokenize.detect_encoding(io.BytesIO(before).readline)[0]
    lines = before.decode(encoding).encode().splitlines(keepends=True)  # columns count bytes of UTF-8
    changed = False
    for finding in sorted(findings, reverse=True):  # the last one first: it moves no other
        changed |= _replace(lines, finding)
    if not changed:
        return Rewritten(path, before, before)
    tree = ast.parse(b"".join(lines))
    if not any(
        isinstance(node, ast.Import)
        and any(alias.name == "namedmesh" and not alias.asname for alias in node.names)
        for node in tree.body
    ):
        at, ending = _first_line(tree), b"\r\n" if lines[0].endswith(b"\r\n") else b"\n"
        lines.insert(at - 1, b"import namedmesh" + ending)
    return Rewritten(path, before, b"".join(lines).decode().encode(encoding))


def _replace(lines: list[bytes], finding: Finding) -> bool:
    """Replace one call in the lines; whether it is where it should be."""
    last, end = finding.end or (0, 0)
    first, start = finding.line, finding.column
    text = b"".join(lines[first - 1 : last])
    stop = len(text) - len(lines[last - 1]) + end - 1
    call = text[start - 1 : stop].decode()
    try:
        found = ast.parse(call, mode="eval").body
    except SyntaxError:
        return False
    if not isinstance(found, ast.Call) or "#" in call:
        return False
    new = re.sub(r"\bmesh\.(?=\w)", f"{_MESH}.", finding.replacement)
    if not isinstance(
        ast.parse(new, mode="eval").body, (ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict)
    ):
        new = f"({new})"
    lines[first - 1 : last] = [text[: start - 1] + new.encode() + text[stop:]]
    return True


def _first_line(tree: ast.Module) -> int:
    """Return the line of the first statement after the docstring and the imports from ``__future__``."""
    after = 0
    for number, node in enumerate(tree.body):
        is_docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            decorators: list[ast.expr] = getattr(node, "decorator_list", [])
            return max(min([node.lineno, *(one.lineno for one in decorators)]), after + 1)
        after = node.end_lineno or node.lineno
    return after + 1
