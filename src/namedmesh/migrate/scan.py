"""Reading a code base: every use of a name of the table, and what replaces it. Nothing is changed or run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.errors import did_you_mean
from namedmesh.migrate.files import Source, Unreadable, python_files, read
from namedmesh.migrate.names import MODULES, Origin, Scopes, is_hint
from namedmesh.migrate.private import ASSIGNED
from namedmesh.migrate.rules import Advice, Arguments
from namedmesh.migrate.table import TABLE

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

__all__ = ["Finding", "Problem", "Scan", "scan", "scan_source"]

_REFERENCE = "passed on, not called: arguments that are given where it is called can ask for another group"
_STAR = "it came with 'import *'"
_COMPUTED = "which name it is, is known only when it runs"
_WORDS = ("parallel_state", "mpu")
_OBJECT_AND_NAME = 2


@dataclass(frozen=True, order=True)
class Finding:
    """One use of a legacy name.

    Args:
        path: the file; for a notebook, with the cell.
        line: the line, from 1.
        column: the column, from 1.
        name: the legacy name.
        legacy: the call, or the name, as it is written.
        replacement: the expression that replaces it; empty where it stays in the dialect, or is not known.
        once: statements that every rank runs once before.
        notes: what to know.
        certain: whether imports say what the name is; otherwise it only sounds like it.
    """

    path: str
    line: int
    column: int
    name: str
    legacy: str
    replacement: str
    once: tuple[str, ...]
    notes: tuple[str, ...]
    certain: bool

    @property
    def known(self) -> bool:
        """Whether the table has the name."""
        return self.name in TABLE


@dataclass(frozen=True, order=True)
class Problem:
    """A file that could not be read, and why."""

    path: str
    message: str


@dataclass(frozen=True)
class Scan:
    """What was found in some files.

    Args:
        files: how many were looked at.
        findings: the uses, by file and line.
        problems: the files that could not be read.
    """

    files: int
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]


def scan(paths: Iterable[str | os.PathLike[str]]) -> Scan:
    """Every use of Megatron's ``parallel_state`` in files and folders.

    Args:
        paths: modules, notebooks, and folders of them.

    Example:
        >>> scan([]).findings
        ()
    """
    findings: list[Finding] = []
    problems = []
    files = 0
    for path in python_files(paths):
        files += 1
        try:
            findings += scan_source(read(path))
        except Unreadable as error:
            problems.append(Problem(str(path), str(error)))
    return Scan(files, tuple(sorted(findings)), tuple(sorted(problems)))


def scan_source(source: Source) -> list[Finding]:
    """Every use in one file.

    Example:
        >>> text = "from megatron.core import mpu; rank = mpu.get_data_parallel_rank()"
        >>> (found,) = scan_source(Source("a.py", ast.parse(text), text))
        >>> found.line, found.column, found.legacy, found.replacement
        (1, 39, 'get_data_parallel_rank()', 'mesh.rank("dp")')
    """
    if not any(word in source.text for word in _WORDS):
        return []
    reader = _Reader(source)
    reader.read()
    return reader.findings


class _Reader(ast.NodeVisitor):
    """A walk over one tree that knows, at each place, what the names there stand for."""

    def __init__(self, source: Source) -> None:
        self.findings: list[Finding] = []
        self._source = source
        self._scopes = Scopes()

    def read(self) -> None:
        self._scopes.enter(self._source.tree.body)
        self.generic_visit(self._source.tree)

    # Scopes.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
        for part in outside:  # defaults and annotations belong to the scope around the function
            self.visit(part)
        self._inside(node.body, node.args)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  the visitor's own spelling

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._inside([node.body], node.args)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._scopes.enter(node.body, is_class=True)
        for statement in node.body:
            self.visit(statement)
        self._scopes.leave()

    def _inside(self, body: list[ast.stmt] | list[ast.expr], arguments: ast.arguments) -> None:
        every = (
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        )
        self._scopes.enter(body, [one.arg for one in every if one is not None])
        for statement in body:
            self.visit(statement)
        self._scopes.leave()

    # Uses.

    def visit_Call(self, node: ast.Call) -> None:
        called = self._named_by_string(node.func) or self._used(node.func)
        if called is not None and called.legacy:
            self._called(node, called)
        elif (named := self._named_by_string(node)) is not None:
            self._passed(node, named)
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        used = self._used(node)
        if used is None:
            self.visit(node.value)
        elif isinstance(node.ctx, ast.Load):
            self._referred(node, used)
        else:
            written = f"del {used.legacy}" if isinstance(node.ctx, ast.Del) else f"{used.legacy} = ..."
            self._add(node, used, written, Advice("", notes=(ASSIGNED,)))

    def visit_Name(self, node: ast.Name) -> None:
        used = self._used(node)
        if used is not None and isinstance(node.ctx, ast.Load):
            self._referred(node, used)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A dotted path, as ``mock.patch`` takes it."""
        if isinstance(node.value, str) and "." in node.value:
            named = Origin(node.value)
            if named.legacy in TABLE:
                self._add(node, named, repr(node.value), Advice("", notes=(ASSIGNED,)))

    def _used(self, node: ast.expr) -> Origin | None:
        """The legacy name that an expression is, if it is one."""
        origin = self._scopes.origin(node)
        if origin is None:
            return self._from_star(node)
        name = origin.legacy
        if not name or "." in name or name.startswith("__"):
            return None
        return origin if origin.certain or name in TABLE else None

    def _from_star(self, node: ast.expr) -> Origin | None:
        if not isinstance(node, ast.Name) or node.id not in TABLE or node.id.startswith("_"):
            return None
        return Origin(f"{MODULES[0]}.{node.id}") if self._scopes.starred(node.id) else None

    def _named_by_string(self, node: ast.expr) -> Origin | None:
        """The legacy name in ``getattr(mpu, "get_x")`` and its like; the module itself for a name not known yet."""
        if not isinstance(node, ast.Call) or len(node.args) < _OBJECT_AND_NAME:
            return None
        module, name = node.args[:_OBJECT_AND_NAME]
        origin = self._scopes.origin(module)
        if origin is None and is_hint(module):
            origin = Origin(MODULES[0], certain=False)
        if origin is None or origin.legacy != "":
            return None
        if isinstance(name, ast.Constant):
            return origin.attribute(name.value) if name.value in TABLE else None
        return origin if origin.certain and _is_call_of(node, "getattr") else None

    # What is said about them.

    def _called(self, node: ast.Call, used: Origin) -> None:
        entry = TABLE.get(used.legacy or "")
        if entry is None:
            self._unknown(node, used)
            return
        given = [*map(ast.unparse, node.args), *(ast.unparse(keyword) for keyword in node.keywords)]
        arguments = Arguments.of(node, entry.parameters or ())
        self._add(node, used, f"{entry.name}({', '.join(given)})", entry.advise(arguments))

    def _referred(self, node: ast.expr, used: Origin) -> None:
        entry = TABLE.get(used.legacy or "")
        if entry is None:
            self._unknown(node, used)
            return
        advice = entry.advise(Arguments())
        if entry.parameters is not None and advice.replacement:
            several = (_REFERENCE,) * (len(entry.variants) > 1)
            advice = Advice(f"lambda: {advice.replacement}", advice.once, (*advice.notes, *several))
        if isinstance(node, ast.Name) and self._scopes.starred(node.id):
            advice = Advice(advice.replacement, advice.once, (*advice.notes, _STAR))
        self._add(node, used, entry.name, advice)

    def _passed(self, node: ast.Call, named: Origin) -> None:
        if _is_call_of(node, "hasattr"):
            return
        if named.legacy == "":
            self._add(node, named, ast.unparse(node), Advice("", notes=(_COMPUTED,)))
        elif _is_call_of(node, "getattr"):
            self._referred(node, named)
        else:
            self._add(node, named, ast.unparse(node), Advice("", notes=(ASSIGNED,)))

    def _unknown(self, node: ast.expr, used: Origin) -> None:
        note = f"the table has no such name{did_you_mean(used.legacy, TABLE)}"
        self._add(node, used, used.legacy or "", Advice("", notes=(note,)))

    def _add(self, node: ast.expr, used: Origin, legacy: str, advice: Advice) -> None:
        path, line = self._source.place(node.lineno)
        self.findings.append(
            Finding(
                path=path,
                line=line,
                column=node.col_offset + 1,
                name=used.legacy or "",
                legacy=legacy,
                replacement=advice.replacement,
                once=advice.once,
                notes=advice.notes,
                certain=used.certain,
            )
        )


def _is_call_of(node: ast.Call, name: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == name
