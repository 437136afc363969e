"""Replace the legacy calls of a code base whose replacement is certain, and leave the others to their remarks."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from namedmesh.errors import NamedMeshError, count_of
from namedmesh.migrate.files import UnreadableError, parse
from namedmesh.migrate.findings import API, INITIALIZE_NAME, Finding, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from namedmesh.migrate.findings import Scan

_MESH = "namedmesh.current_mesh()"
_NAME = m.Name("namedmesh")
_BINDINGS = m.AssignTarget(target=_NAME) | m.Param(name=_NAME) | m.AsName(name=_NAME)


class RewriteError(NamedMeshError, RuntimeError):
    """A file could not be written, or was changed by somebody else in between."""


@dataclass(frozen=True)
class Rewritten:
    """A file before and after.

    Args:
        path: the file.
        before: its bytes.
        after: what they become.
        encoding: the encoding of both.
        done: the uses that were replaced.
    """

    path: str
    before: bytes
    after: bytes
    encoding: str
    done: tuple[Finding, ...]

    def diff(self) -> str:
        """Return the difference as ``patch`` takes it."""
        before, after = (_lines(side.decode(self.encoding)) for side in (self.before, self.after))
        lines = difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


@dataclass(frozen=True)
class Rewriting:
    """What can be rewritten.

    Args:
        files: the files that change; those that make the groups come first.
        problems: the files that cannot be rewritten.
        remarks: why calls stay that are certain by themselves.
    """

    files: tuple[Rewritten, ...]
    problems: tuple[Problem, ...] = ()
    remarks: tuple[str, ...] = ()


def _lines(text: str) -> list[str]:
    """Return the lines with their ends, where Python and ``patch`` see them."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [line for line in text.split("\n")[-1:] if line]


def is_certain(finding: Finding) -> bool:
    """Return whether a use can be replaced in place: a call that is certain, without statements or remarks.

    What it needs besides, a mesh, is the one that ``namedmesh.current_mesh()`` returns.
    """
    return (
        finding.certain
        and finding.end is not None
        and "mesh." in finding.replacement
        and not (finding.once or finding.notes)
        and "mesh" not in finding.legacy  # an argument of that name would be taken for ours
        and finding.name != INITIALIZE_NAME
    )


def rewrite(scan: Scan) -> Rewriting:
    """Return the files with every certain use replaced, and with our dialect installed where the groups are made.

    The mesh that the replaced calls ask is the one that ``initialize_model_parallel`` makes once the dialect is installed;
    the calls that are left answer from it, too. Where the groups are made in a way that is not certain, no call of that
    API is replaced.
    """
    remarks = []
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
        for one in () if api.is_ours else makers:
            installs.setdefault(one.path, set()).add(api.dialect.rpartition(".")[0])
        if not makers:
            remarks.append(f"no call of {INITIALIZE_NAME} is here: what uses these files makes the mesh")
    files: list[Rewritten] = []
    problems = []
    for path in sorted(
        {one.path for one in uses} | {*installs}, key=lambda path: (path not in installs, path)
    ):
        try:
            files.append(_rewrite(path, [one for one in uses if one.path == path], installs.get(path, set())))
        except UnreadableError as error:  # noqa: PERF203  the other files are rewritten
            problems.append(Problem(path, str(error)))
            if path in installs:
                return Rewriting((), tuple(problems), (f"nothing is replaced: {path} makes the groups",))
    return Rewriting(
        tuple(file for file in files if file.after != file.before), tuple(problems), tuple(remarks)
    )


def write(file: Rewritten) -> str:
    """Write a file at once, and keep what it was beside it; return the path of that.

    Raises:
        RewriteError: one of them cannot be written, or the file is not what was read; it is as it was.
    """
    path = Path(os.path.realpath(file.path))
    made: list[str] = []
    try:
        if path.read_bytes() != file.before:
            raise RewriteError(f"{file.path!r} was changed while it was read")
        made.append(_copy_beside(file))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
            made.append(new.name)
            new.write(file.after)
        shutil.copymode(path, new.name)
        Path(new.name).replace(path)
    except OSError as error:
        for name in made:
            Path(name).unlink(missing_ok=True)
        raise RewriteError(f"{file.path!r} cannot be rewritten: {error.strerror}") from None
    return made[0]


def _copy_beside(file: Rewritten) -> str:
    number = 0
    while True:
        backup = f"{file.path}.orig.{number}" if number else f"{file.path}.orig"
        try:
            with Path(backup).open("xb") as old:
                old.write(file.before)
        except FileExistsError:
            number += 1
        else:
            shutil.copymode(file.path, backup)
            return backup


def _rewrite(path: str, findings: Sequence[Finding], installs: set[str]) -> Rewritten:
    """Return one file with some uses replaced, and some dialects installed.

    Raises:
        UnreadableError: the file is not what it was, or is no Python afterwards.
    """
    before = Path(path).read_bytes()
    try:
        module = cst.parse_module(before)
    except cst.ParserSyntaxError:
        raise UnreadableError("was changed while it was read") from None
    if module.bytes != before:
        raise UnreadableError(
            "LibCST does not write it back unchanged, because of a form feed or its line ends"
        )
    if m.findall(module, _BINDINGS):
        raise UnreadableError("binds the name 'namedmesh' to something of its own")
    replacer = _Replacer(findings)
    module = MetadataWrapper(module, unsafe_skip_copy=True).visit(replacer)
    if replacer.left:
        raise UnreadableError("was changed while it was read")
    lines = []
    for name in sorted(installs):
        if f"{name}.install()" not in module.code:
            lines += [f"import {name}", f"{name}.install()"]
    if findings and not lines and not _imports_namedmesh(module):
        lines = ["import namedmesh"]
    module = _with_lines(module, lines)
    parse(module.bytes)
    return Rewritten(path, before, module.bytes, module.encoding, tuple(findings))


class _Replacer(cst.CSTTransformer):
    """Replace the calls at some places."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, findings: Iterable[Finding]) -> None:
        super().__init__()
        self.left = {((one.line, one.column), one.end): one for one in findings}

    def leave_Call(  # noqa: N802  the visitor's own spelling
        self, original_node: cst.Call, updated_node: cst.Call
    ) -> cst.BaseExpression:
        place = self.get_metadata(PositionProvider, original_node)
        start, end = ((one.line, one.column + 1) for one in (place.start, place.end))
        finding = self.left.pop((start, end), None)
        if finding is None:
            return updated_node
        new = cst.parse_expression(re.sub(r"\bmesh\.(?=\w)", f"{_MESH}.", finding.replacement))
        if not isinstance(new, (cst.Call, cst.Attribute, cst.Subscript, cst.List, cst.Dict)):
            new = new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return new.with_changes(lpar=[*updated_node.lpar, *new.lpar], rpar=[*new.rpar, *updated_node.rpar])


def _with_lines(module: cst.Module, lines: Sequence[str]) -> cst.Module:
    """Insert lines before the first statement that may need what they import."""
    body = list(module.body)
    for number, statement in enumerate(body):
        parts = list(statement.body) if isinstance(statement, cst.SimpleStatementLine) else []
        kept = sum(1 for _ in _leading(parts, is_first=number == 0))
        if parts and kept == len(parts):
            continue
        new = cst.parse_module("".join(f"{line}\n" for line in lines)).body
        if kept:  # code on the line of the docstring
            inserted = [part for one in new if isinstance(one, cst.SimpleStatementLine) for part in one.body]
            body[number] = statement.with_changes(body=[*parts[:kept], *inserted, *parts[kept:]])
        else:
            body[number:number] = new
        return module.with_changes(body=body)
    return module


def _leading(parts: Sequence[cst.BaseSmallStatement], *, is_first: bool) -> Iterator[cst.BaseSmallStatement]:
    """Yield the parts of a line that must stay first: a docstring and imports from ``__future__``."""
    for number, part in enumerate(parts):
        docstring = (
            is_first
            and number == 0
            and m.matches(part, m.Expr(value=m.SimpleString() | m.ConcatenatedString()))
        )
        if not docstring and not m.matches(part, m.ImportFrom(module=m.Name("__future__"))):
            return
        yield part


def _imports_namedmesh(module: cst.Module) -> bool:
    """Return whether one of the first statements, up to the first that is no import, imports namedmesh."""
    wanted = m.Import(names=[m.ZeroOrMore(), m.ImportAlias(name=_NAME, asname=None), m.ZeroOrMore()])
    for number, statement in enumerate(module.body):
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        for part in statement.body:
            if m.matches(part, wanted):
                return True
            if not isinstance(part, (cst.Import, cst.ImportFrom)) and (
                number or not isinstance(part, cst.Expr)
            ):
                return False
    return False
