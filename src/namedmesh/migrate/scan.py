"""Find every use of a name of the table in a code base, and what replaces it; the code is neither changed nor run."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from namedmesh.errors import did_you_mean
from namedmesh.migrate.rules import Advice, Arguments
from namedmesh.migrate.scopes import MODULES, USUAL_NAMES, Exports, Origin, Scopes, exported, has_usual_name
from namedmesh.migrate.sources import (
    Source,
    UnreadableError,
    fstring_quotes,
    module_names,
    python_files,
    read,
)
from namedmesh.migrate.table import TABLE

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

_ASSIGNED = (
    "an assignment patches what the legacy calls answer and no mesh; where a test stands in for groups, give it a mesh "
    "of its own, adopted with NamedMesh.from_groups({'tp': group, ...})"
)
_REFERENCE = "passed on, not called: arguments that are given where it is called can ask for another group"
_STAR = "it came with 'import *'"
_COMPUTED = "which name it is, is known only when it runs"
_IN_FSTRING = (
    "an f-string before Python 3.12 cannot hold these quotation marks: assign it to a variable first"
)
_OBJECT_AND_NAME = 2
PROVIDED = frozenset(
    (
        *("megatron", "megatron.core", *(module for module in MODULES if module.startswith("megatron."))),
        *("megatron.core.tensor_parallel",),
        *(
            f"megatron.core.tensor_parallel.{part}"
            for part in ("cross_entropy", "layers", "mappings", "utils")
        ),
    )
)
"""What can be imported after ``install()`` where megatron-core is not installed."""
_ABSENT = frozenset(
    f"megatron.core.tensor_parallel.{part}" for part in ("data", "random", "inference_layers")
)


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
        end: the line and the column after the last character of a call; None for what is no call.
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
    end: tuple[int, int] | None = None

    @property
    def known(self) -> bool:
        """Whether the table has the name."""
        return self.name in TABLE


@dataclass(frozen=True, order=True)
class Problem:
    """A file that could not be read, and why."""

    path: str
    message: str


@dataclass(frozen=True, order=True)
class Missing:
    """An import that finds nothing where megatron-core is not installed, and that namedmesh does not replace."""

    path: str
    line: int
    module: str


@dataclass(frozen=True)
class Scan:
    """The uses of legacy names in some files.

    Args:
        files: how many files were read.
        findings: the uses, by file and line.
        problems: the files that could not be read.
        missing: imports of Megatron that have no replacement.
    """

    files: int
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]
    missing: tuple[Missing, ...] = ()


def scan(paths: Sequence[str | os.PathLike[str]]) -> Scan:
    """Find every use of Megatron's ``parallel_state`` in files and folders, also by way of the code's own modules.

    Args:
        paths: modules, notebooks, and folders of them.

    Example:
        >>> scan([]).findings
        ()
    """
    sources: list[tuple[tuple[str, ...], Source]] = []
    problems = []
    files = 0
    for path in python_files(paths):
        files += 1
        try:
            sources.append((module_names(path, paths), read(path)))
        except UnreadableError as error:
            problems.append(Problem(str(path), str(error)))
    # A module that names neither Megatron nor the usual names may still have them from another one.
    exports = (
        exported([(names, source.tree) for names, source in sources]) if any(map(_is_legacy, sources)) else {}
    )
    visitors = [_visited(source, exports, names[0]) for names, source in sources]
    findings = [finding for visitor in visitors for finding in visitor.findings]
    missing = [one for visitor in visitors for one in visitor.missing]
    return Scan(files, tuple(sorted(findings)), tuple(sorted(problems)), tuple(sorted(missing)))


def scan_source(source: Source) -> list[Finding]:
    """Find every use in one file.

    Example:
        >>> text = "from megatron.core import mpu; rank = mpu.get_data_parallel_rank()"
        >>> (use,) = scan_source(Source("a.py", ast.parse(text), text))
        >>> use.line, use.column, use.legacy, use.replacement
        (1, 39, 'get_data_parallel_rank()', 'mesh.rank("dp")')
    """
    return _visited(source, {}, "").findings


def _is_legacy(source: tuple[tuple[str, ...], Source]) -> bool:
    return any(name in source[1].text for name in USUAL_NAMES)


def _visited(source: Source, exports: Exports, module: str) -> _Visitor:
    visitor = _Visitor(source, exports, module)
    if exports or any(name in source.text for name in ("megatron", *USUAL_NAMES)):
        visitor.visit(source.tree)
    return visitor


class _Visitor(ast.NodeVisitor):
    """Visit one tree, and resolve the names at each node by the scopes around it."""

    def __init__(self, source: Source, exports: Exports, module: str) -> None:
        self.findings: list[Finding] = []
        self.missing: list[Missing] = []
        self._source = source
        self._scopes = Scopes(exports, module)
        self._fstrings = 0

    # Imports.

    def visit_Import(self, node: ast.Import) -> None:
        self._check_imports(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module in {"megatron", "megatron.core", "megatron.core.tensor_parallel"}:
            named = [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"]
            inside = node.module == "megatron.core.tensor_parallel"  # its functions are there
            self._check_imports(node, [name for name in named if not inside or name in _ABSENT])
        elif node.level == 0:
            self._check_imports(node, [node.module or ""])

    def _check_imports(self, node: ast.stmt, modules: list[str]) -> None:
        for module in modules:
            if module.partition(".")[0] == "megatron" and module not in PROVIDED:
                self.missing.append(Missing(*self._source.locate(node.lineno), module))

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

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._fstrings += 1
        self.generic_visit(node)
        self._fstrings -= 1

    def visit_Constant(self, node: ast.Constant) -> None:
        """Visit a dotted path, as ``mock.patch`` takes it."""
        if isinstance(node.value, str) and "." in node.value:
            origin = Origin(node.value)
            if origin.legacy in TABLE:
                self._add(node, origin, repr(node.value), Advice("", notes=(_ASSIGNED,)))

    def _legacy_origin(self, node: ast.expr) -> Origin | None:
        """Return the legacy name that an expression is, if it is one."""
        origin = self._scopes.origin(node)
        if origin is None:
            return self._from_star_import(node)
        name = origin.legacy
        if not name or "." in name or name.startswith("__"):
            return None
        return origin if origin.certain or name in TABLE else None

    def _from_star_import(self, node: ast.expr) -> Origin | None:
        if not isinstance(node, ast.Name) or node.id not in TABLE or node.id.startswith("_"):
            return None
        return Origin(f"{MODULES[0]}.{node.id}") if self._scopes.from_star_import(node.id) else None

    def _named_by_string(self, node: ast.expr) -> Origin | None:
        """Return the legacy name in ``getattr(mpu, "get_x")`` and its like; the module itself for a computed name."""
        if not isinstance(node, ast.Call) or len(node.args) < _OBJECT_AND_NAME:
            return None
        module, name = node.args[:_OBJECT_AND_NAME]
        origin = self._scopes.origin(module)
        if origin is None and has_usual_name(module):
            origin = Origin(MODULES[0], certain=False)
        if origin is None or origin.legacy != "":
            return None
        if isinstance(name, ast.Constant):
            return origin.attribute(name.value) if name.value in TABLE else None
        return origin if origin.certain and _is_call_of(node, "getattr") else None

    # Findings.

    def _add_call(self, node: ast.Call, origin: Origin) -> None:
        entry = TABLE.get(origin.legacy or "")
        if entry is None:
            self._add_unknown(node, origin)
            return
        arguments = ", ".join(ast.unparse(argument) for argument in (*node.args, *node.keywords))
        advice = entry.advise(Arguments.of(node, entry.parameters or ()))
        self._add(node, origin, f"{entry.name}({arguments})", advice)

    def _add_reference(self, node: ast.expr, origin: Origin) -> None:
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

    def _add_named_by_string(self, node: ast.Call, origin: Origin) -> None:
        if _is_call_of(node, "hasattr"):
            return
        if origin.legacy and _is_call_of(node, "getattr"):
            self._add_reference(node, origin)
        else:
            note = _ASSIGNED if origin.legacy else _COMPUTED
            self._add(node, origin, ast.unparse(node), Advice("", notes=(note,)))

    def _add_unknown(self, node: ast.expr, origin: Origin) -> None:
        note = f"the table has no such name{did_you_mean(origin.legacy, TABLE)}"
        self._add(node, origin, origin.legacy or "", Advice("", notes=(note,)))

    def _add(self, node: ast.expr, origin: Origin, legacy: str, advice: Advice) -> None:
        path, line = self._source.locate(node.lineno)
        if self._fstrings and advice.replacement:
            advice = self._quoted(node, advice)
        is_call = isinstance(node, ast.Call) and node.end_lineno is not None and not self._source.cells
        self.findings.append(
            Finding(
                path,
                line,
                node.col_offset + 1,
                origin.legacy or "",
                legacy,
                advice.replacement,
                advice.once,
                advice.notes,
                origin.certain,
                (node.end_lineno or 0, (node.end_col_offset or 0) + 1) if is_call else None,
            )
        )

    def _quoted(self, node: ast.expr, advice: Advice) -> Advice:
        """Write the quotation marks that the f-string around an expression allows before Python 3.12."""
        around = fstring_quotes(self._source.text, node.lineno, node.col_offset)
        free = [quote for quote in "\"'" if quote not in around and self._fstrings == 1]
        if free and not (free == ["'"] and "'" in advice.replacement):
            return replace(advice, replacement=advice.replacement.replace('"', free[0]))
        return replace(advice, notes=(*advice.notes, _IN_FSTRING))


def _parameters(arguments: ast.arguments) -> list[str]:
    return [child.arg for child in ast.iter_child_nodes(arguments) if isinstance(child, ast.arg)]


def _is_call_of(node: ast.Call, name: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == name
