"""Replace the legacy calls of a code base whose replacement is certain, and leave the others to their remarks."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from namedmesh.errors import NamedMeshError, count_of
from namedmesh.migrate.apis import API, INITIALIZE_NAME
from namedmesh.migrate.files import Source, UnreadableError, parse
from namedmesh.migrate.findings import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from namedmesh.migrate.findings import Finding, Scan

_MESH = "namedmesh.current_mesh()"


class RewriteError(NamedMeshError, RuntimeError):
    """A file could not be written, or was changed by somebody else in between."""


@dataclass(frozen=True)
class Rewritten:
    """A file before and after, and the uses that were replaced."""

    before: Source
    after: Source
    done: tuple[Finding, ...]

    def diff(self) -> str:
        """Return the difference as ``patch`` takes it."""
        path, encoding = self.before.path, self.before.encoding.removesuffix("-sig")
        before, after = (
            re.findall(r"[^\n]*\n|[^\n]+", side.code.decode(encoding)) for side in (self.before, self.after)
        )
        lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


def is_certain(finding: Finding) -> bool:
    """Return whether a use can be replaced in place: a call that is certain and needs nothing but the current mesh."""
    return (
        finding.certain
        and finding.end is not None
        and "mesh." in finding.replacement
        and not (finding.once or finding.notes)
        and "mesh" not in finding.legacy  # an argument of that name would be taken for ours
        and finding.name != INITIALIZE_NAME
    )


def rewrite(scan: Scan) -> tuple[list[Rewritten], Scan]:
    """Replace every certain use, install our dialect where the groups are made, and return the files and what is left."""
    # The replaced calls, and those that are left, ask the mesh that the installed dialect's initialization makes.
    remarks = [*scan.remarks]
    uses: list[Finding] = []
    installs: dict[str, set[str]] = {}
    for origin, api in API.items():
        certain = [one for one in scan.findings if one.origin == origin and is_certain(one)]
        makers = [one for one in scan.findings if one.origin == origin and one.name == INITIALIZE_NAME]
        stuck = [one for one in makers if not (one.certain and one.end and api.dialect)]
        if not certain:
            continue
        if stuck:
            remarks.append(
                f"{stuck[0].path}:{stuck[0].line} makes the groups of {origin} in a way that is not certain: "
                f"{count_of(len(certain), 'call')} that would be replaced otherwise stay"
            )
            continue
        uses += certain
        for one in () if api.name == api.dialect else makers:
            installs.setdefault(one.path, set()).add(api.dialect.rpartition(".")[0])
        if not makers:
            remarks.append(f"no call of {INITIALIZE_NAME} is here: what uses these files makes the mesh")
    files: list[Rewritten] = []
    problems = [*scan.problems]
    paths = {one.path for one in uses} - installs.keys()
    for path in (*sorted(installs), *sorted(paths)):
        mine = [one for one in uses if one.path == path]
        try:
            files.append(_rewritten(scan.sources[path], mine, installs.get(path, set())))
        except UnreadableError as error:
            problems.append(Problem(path, str(error)))
            if path in installs:
                files, remarks = [], [*scan.remarks, f"nothing is replaced: {path} makes the groups"]
                break
    changed = [file for file in files if file.after != file.before]
    done = {finding for file in changed for finding in file.done}
    left = tuple(one for one in scan.findings if one not in done)
    return changed, replace(scan, findings=left, problems=tuple(problems), remarks=tuple(remarks))


def write(file: Rewritten) -> str:
    """Write a file at once, and keep what it was beside it; return the path of that, or raise a RewriteError and change nothing."""
    given = file.before.path
    path = Path(os.path.realpath(given))
    made: list[str] = []
    try:
        if path.read_bytes() != file.before.code:
            raise RewriteError(f"{given!r} was changed while it was read")
        made.append(_copy_beside(file.before))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
            made.append(new.name)
            new.write(file.after.code)
        shutil.copymode(path, new.name)
        Path(new.name).replace(path)
    except OSError as error:
        for name in made:
            Path(name).unlink(missing_ok=True)
        raise RewriteError(f"{given!r} cannot be rewritten: {error.strerror}") from None
    return made[0]


def _copy_beside(file: Source) -> str:
    number = 0
    while True:
        backup = f"{file.path}.orig.{number}" if number else f"{file.path}.orig"
        try:
            with Path(backup).open("xb") as old:
                old.write(file.code)
        except FileExistsError:
            number += 1
        else:
            shutil.copymode(file.path, backup)
            return backup


def _rewritten(source: Source, findings: Sequence[Finding], installs: set[str]) -> Rewritten:
    """Return one file with some uses replaced, and some dialects installed; an UnreadableError if that is no Python."""
    tree = parse(source)
    if any(map(_binds_namedmesh, ast.walk(tree))):
        raise UnreadableError("binds the name 'namedmesh' to something of its own")
    statements = []
    for name in sorted(installs):
        if f"{name}.install()" not in source.text:
            statements += [f"import {name}", f"{name}.install()"]
    if findings and not statements and not _imports_namedmesh(tree):
        statements = ["import namedmesh"]
    starts = [0, *accumulate(map(len, source.lines))]
    changes = [_insertion(tree, source, starts, statements)] if statements else []
    for one in findings:
        end_line, end_column = one.end or (one.line, one.column)
        start, end = starts[one.line - 1] + one.column - 1, starts[end_line - 1] + end_column - 1
        changes.append((start, end, _replacement(one)))
    after = replace(source, code=_changed(source.text, changes).encode(source.encoding))
    parse(after)
    return Rewritten(source, after, tuple(findings))


def _replacement(finding: Finding) -> str:
    new = re.sub(r"\bmesh\.(?=\w)", f"{_MESH}.", finding.replacement)
    node = ast.parse(new, mode="eval").body
    alone = isinstance(node, (ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict))
    return new if alone else f"({new})"


def _changed(text: str, changes: Iterable[tuple[int, int, str]]) -> str:
    """Replace parts of a text; those inside another one, such as a call in its arguments, go with it."""
    parts = []
    done = 0
    for start, end, new in sorted(changes, key=lambda change: (change[0], -change[1])):
        if start >= done:
            parts += [text[done:start], new]
            done = end
    return "".join([*parts, text[done:]])


def _insertion(
    tree: ast.Module, source: Source, starts: Sequence[int], statements: Sequence[str]
) -> tuple[int, int, str]:
    """Return where statements are inserted before the first one that may need them, and their text."""
    kept = [*_docstring(tree)]
    kept += takewhile(_is_future, tree.body[len(kept) :])
    first = tree.body[len(kept)]
    line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))])
    if kept:
        line = (kept[-1].end_lineno or 0) + 1
    if line > first.lineno:  # code on the line of the docstring
        (line, column), _ = source.span(first)
        place, text = starts[line - 1] + column - 1, "; ".join([*statements, ""])
    else:
        ending = re.search(r"[\r\n]*$", source.lines[0])
        end_of_line = (ending and ending[0]) or "\n"
        place, text = starts[line - 1], "".join(f"{one}{end_of_line}" for one in statements)
    return place, place, text


def _docstring(tree: ast.Module) -> list[ast.stmt]:
    return tree.body[:1] if ast.get_docstring(tree, clean=False) is not None else []


def _is_future(one: ast.stmt) -> bool:
    return isinstance(one, ast.ImportFrom) and one.module == "__future__"


def _imports_namedmesh(tree: ast.Module) -> bool:
    """Return whether one of the first statements, up to the first that is no import, imports namedmesh."""
    for one in tree.body[len(_docstring(tree)) :]:
        if not isinstance(one, (ast.Import, ast.ImportFrom)):
            return False
        if isinstance(one, ast.Import) and any(
            each.name == "namedmesh" and not each.asname for each in one.names
        ):
            return True
    return False


def _binds_namedmesh(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "namedmesh" and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.arg):
        return node.arg == "namedmesh"
    return isinstance(node, ast.alias) and node.asname == "namedmesh"
