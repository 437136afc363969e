"""Find every use of a name of the table in a code base, and what replaces it; the code is neither changed nor run."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from namedmesh.errors import did_you_mean
from namedmesh.migrate.rules import DIALECT, Advice, Arguments
from namedmesh.migrate.sources import Source, UnreadableError, python_files, read
from namedmesh.migrate.table import TABLE

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Finding", "Problem", "Scan", "scan", "scan_source"]

_MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", DIALECT)
_PARENTS = frozenset(
    ".".join(parts[:n])
    for parts in (module.split(".") for module in _MODULES)
    for n in range(1, len(parts) + 1)
)
_USUAL_NAMES = ("parallel_state", "mpu")

_ASSIGNED = (
    "an assignment patches what the legacy calls answer and no mesh; where a test stands in for groups, give it a mesh "
    "of its own, adopted with NamedMesh.from_groups({'tp': group, ...})"
)
_REFERENCE = "passed on, not called: arguments that are given where it is called can ask for another group"
_STAR = "it came with 'import *'"
_COMPUTED = "which name it is, is known only when it runs"
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
        notes: remarks.
        certain: whether imports determine what the name is; otherwise it only looks like a legacy one.
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
    """The uses of legacy names in some files.

    Args:
        files: how many files were read.
        findings: the uses, by file and line.
        problems: the files that could not be read.
    """

    files: int
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]


def scan(paths: Iterable[str | os.PathLike[str]]) -> Scan:
    """Find every use of Megatron's ``parallel_state`` in files and folders.

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
        except UnreadableError as error:
            problems.append(Problem(str(path), str(error)))
    return Scan(files, tuple(sorted(findings)), tuple(sorted(problems)))


def scan_source(source: Source) -> list[Finding]:
    """Find every use in one file.

    Example:
        >>> text = "from megatron.core import mpu; rank = mpu.get_data_parallel_rank()"
        >>> (use,) = scan_source(Source("a.py", ast.parse(text), text))
        >>> use.line, use.column, use.legacy, use.replacement
        (1, 39, 'get_data_parallel_rank()', 'mesh.rank("dp")')
    """
    if not any(name in source.text for name in _USUAL_NAMES):
        return []
    visitor = _Visitor(source)
    visitor.visit(source.tree)
    return visitor.findings


@dataclass(frozen=True)
class _Origin:
    """The dotted name that an expression stands for, and whether imports determine it."""

    dotted: str
    certain: bool = True

    def attribute(self, name: str) -> _Origin:
        return replace(self, dotted=f"{self.dotted}.{name}")

    @property
    def legacy(self) -> str | None:
        """The name inside the legacy module; the empty string for the module itself, None outside of it."""
        for module in _MODULES:
            if f"{self.dotted}.".startswith(f"{module}."):
                return self.dotted[len(module) + 1 :]
        return None


class _Scope:
    """The names that one module, class or function binds; None for what is bound to something else."""

    def __init__(self, *, is_class: bool) -> None:
        self.bound: dict[str, _Origin | None] = {}
        self.star = False
        self.is_class = is_class

    def bind(self, name: str, origin: _Origin | None) -> None:
        """Record a binding. A known origin takes precedence: ``mpu = None`` replaces an import that failed."""
        if origin is not None or name not in self.bound:
            self.bound[name] = origin


class _Scopes:
    """The scopes around one line of the code, the module's first."""

    def __init__(self) -> None:
        self._stack: list[_Scope] = []

    def enter(
        self, body: Sequence[ast.AST], parameters: Sequence[str] = (), *, is_class: bool = False
    ) -> None:
        """Enter the scope of a body, after reading all of it: a function may use what is bound further down."""
        scope = _Scope(is_class=is_class)
        self._stack.append(scope)
        for name in parameters:
            scope.bind(name, None)
        for statement in body:
            for node in _own_nodes(statement):
                self._record(node, scope)

    def leave(self) -> None:
        """Leave the innermost scope."""
        self._stack.pop()

    def origin(self, node: ast.expr) -> _Origin | None:
        """Return the origin of an expression; None where it is not known."""
        if isinstance(node, ast.Name):
            for depth, scope in enumerate(reversed(self._stack)):
                if node.id in scope.bound and (depth == 0 or not scope.is_class):
                    return scope.bound[node.id]
        if isinstance(node, ast.Attribute):
            base = self.origin(node.value)
            if base is not None:
                return base.attribute(node.attr)
            if _has_usual_name(node.value):
                return _Origin(f"{_MODULES[0]}.{node.attr}", certain=False)
        return None

    def from_star_import(self, name: str) -> bool:
        """Whether a name that nothing else binds can come from ``import *``."""
        return not any(name in scope.bound for scope in self._stack) and any(
            scope.star for scope in self._stack
        )

    def _record(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                dotted = alias.name if alias.asname else alias.name.split(".")[0]
                scope.bind(alias.asname or dotted, _Origin(dotted) if dotted in _PARENTS else None)
        elif isinstance(node, ast.ImportFrom):
            _record_import_from(node, scope)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bind(node.name, None)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            origin = self.origin(node.value) if node.value else None
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    scope.bind(target.id, origin)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            scope.bind(node.id, None)


def _has_usual_name(node: ast.expr) -> bool:
    """Whether an expression is named as the legacy module: ``mpu``, ``self.mpu``, ``cfg.parallel_state``."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return any(name.strip("_") == usual or name.endswith(f"_{usual}") for usual in _USUAL_NAMES)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, without the bodies of functions and classes, which have their own scopes."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _own_nodes(child)


def _record_import_from(node: ast.ImportFrom, scope: _Scope) -> None:
    base = _Origin(node.module or "" if node.level == 0 else "")
    if node.level and (node.module or "").split(".")[-1] in _USUAL_NAMES:
        base = _Origin(_MODULES[0], certain=False)
    for alias in node.names:
        if alias.name == "*":
            scope.star = scope.star or base.legacy == ""
            continue
        origin = base.attribute(alias.name)
        known = origin.legacy is not None or origin.dotted in _PARENTS
        scope.bind(alias.asname or alias.name, origin if known else None)


class _Visitor(ast.NodeVisitor):
    """Visit one tree, and resolve the names at each node by the scopes around it."""

    def __init__(self, source: Source) -> None:
        self.findings: list[Finding] = []
        self._source = source
        self._scopes = _Scopes()

    # Scopes.

    def visit_Module(self, node: ast.Module) -> None:
        self._visit_body(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
        for part in outside:  # defaults and annotations belong to the scope around the function
            self.visit(part)
        self._visit_body(node.body, _parameters(node.args))

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  the visitor's own spelling

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._visit_body([node.body], _parameters(node.args))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._visit_body(node.body, is_class=True)

    def _visit_body(
        self, body: Sequence[ast.AST], parameters: Sequence[str] = (), *, is_class: bool = False
    ) -> None:
        self._scopes.enter(body, parameters, is_class=is_class)
        for statement in body:
            self.visit(statement)
        self._scopes.leave()

    # Uses.

    def visit_Call(self, node: ast.Call) -> None:
        function = self._named_by_string(node.func) or self._legacy_origin(node.func)
        if function is not None and function.legacy:
            self._add_call(node, function)
        elif (named := self._named_by_string(node)) is not None:
            self._add_named_by_string(node, named)
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        origin = self._legacy_origin(node)
        if origin is None:
            self.visit(node.value)
        elif isinstance(node.ctx, ast.Load):
            self._add_reference(node, origin)
        else:
            written = f"del {origin.legacy}" if isinstance(node.ctx, ast.Del) else f"{origin.legacy} = ..."
            self._add(node, origin, written, Advice("", notes=(_ASSIGNED,)))

    def visit_Name(self, node: ast.Name) -> None:
        origin = self._legacy_origin(node)
        if origin is not None and isinstance(node.ctx, ast.Load):
            self._add_reference(node, origin)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Visit a dotted path, as ``mock.patch`` takes it."""
        if isinstance(node.value, str) and "." in node.value:
            origin = _Origin(node.value)
            if origin.legacy in TABLE:
                self._add(node, origin, repr(node.value), Advice("", notes=(_ASSIGNED,)))

    def _legacy_origin(self, node: ast.expr) -> _Origin | None:
        """Return the legacy name that an expression is, if it is one."""
        origin = self._scopes.origin(node)
        if origin is None:
            return self._from_star_import(node)
        name = origin.legacy
        if not name or "." in name or name.startswith("__"):
            return None
        return origin if origin.certain or name in TABLE else None

    def _from_star_import(self, node: ast.expr) -> _Origin | None:
        if not isinstance(node, ast.Name) or node.id not in TABLE or node.id.startswith("_"):
            return None
        return _Origin(f"{_MODULES[0]}.{node.id}") if self._scopes.from_star_import(node.id) else None

    def _named_by_string(self, node: ast.expr) -> _Origin | None:
        """Return the legacy name in ``getattr(mpu, "get_x")`` and its like; the module itself for a computed name."""
        if not isinstance(node, ast.Call) or len(node.args) < _OBJECT_AND_NAME:
            return None
        module, name = node.args[:_OBJECT_AND_NAME]
        origin = self._scopes.origin(module)
        if origin is None and _has_usual_name(module):
            origin = _Origin(_MODULES[0], certain=False)
        if origin is None or origin.legacy != "":
            return None
        if isinstance(name, ast.Constant):
            return origin.attribute(name.value) if name.value in TABLE else None
        return origin if origin.certain and _is_call_of(node, "getattr") else None

    # Findings.

    def _add_call(self, node: ast.Call, origin: _Origin) -> None:
        entry = TABLE.get(origin.legacy or "")
        if entry is None:
            self._add_unknown(node, origin)
            return
        arguments = ", ".join(ast.unparse(argument) for argument in (*node.args, *node.keywords))
        advice = entry.advise(Arguments.of(node, entry.parameters or ()))
        self._add(node, origin, f"{entry.name}({arguments})", advice)

    def _add_reference(self, node: ast.expr, origin: _Origin) -> None:
        entry = TABLE.get(origin.legacy or "")
        if entry is None:
            self._add_unknown(node, origin)
            return
        advice = entry.advise(Arguments())
        notes = advice.notes
        if entry.parameters is not None and advice.replacement:
            notes += (_REFERENCE,) * (len(entry.variants) > 1)
            advice = replace(advice, replacement=f"lambda: {advice.replacement}")
        if isinstance(node, ast.Name) and self._scopes.from_star_import(node.id):
            notes += (_STAR,)
        self._add(node, origin, entry.name, replace(advice, notes=notes))

    def _add_named_by_string(self, node: ast.Call, origin: _Origin) -> None:
        if _is_call_of(node, "hasattr"):
            return
        if origin.legacy and _is_call_of(node, "getattr"):
            self._add_reference(node, origin)
        else:
            note = _ASSIGNED if origin.legacy else _COMPUTED
            self._add(node, origin, ast.unparse(node), Advice("", notes=(note,)))

    def _add_unknown(self, node: ast.expr, origin: _Origin) -> None:
        note = f"the table has no such name{did_you_mean(origin.legacy, TABLE)}"
        self._add(node, origin, origin.legacy or "", Advice("", notes=(note,)))

    def _add(self, node: ast.expr, origin: _Origin, legacy: str, advice: Advice) -> None:
        path, line = self._source.locate(node.lineno)
        name, column = origin.legacy or "", node.col_offset + 1
        self.findings.append(
            Finding(
                path,
                line,
                column,
                name,
                legacy,
                advice.replacement,
                advice.once,
                advice.notes,
                origin.certain,
            )
        )


def _parameters(arguments: ast.arguments) -> list[str]:
    return [child.arg for child in ast.iter_child_nodes(arguments) if isinstance(child, ast.arg)]


def _is_call_of(node: ast.Call, name: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == name
