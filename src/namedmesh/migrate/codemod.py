"""Find the names of the tables in one file, and replace those that are certain: LibCST, with its qualified names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor
from libcst.metadata import (
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    PositionProvider,
    QualifiedName,
    QualifiedNameProvider,
    QualifiedNameSource,
    ScopeProvider,
)

from namedmesh.migrate.table import APIS, Advice, advise

if TYPE_CHECKING:
    from collections.abc import Collection

MARKS = re.compile(
    rb"\b(?:parallel_state|mpu|megatron\.core|fairscale|(?:get|is|initialize)_\w*(?:parallel|pipeline)_\w+)\b"
)
"""What stands in every file that can name something of the tables: others are not parsed."""
_EMPTY = cst.Module([])


class Finding(NamedTuple):
    """One use of a legacy name: where, its source, and what replaces it; nothing where it stays."""

    line: int
    old: str
    advice: Advice


class Imported(NamedTuple):
    """One import: the module, the name that is taken from it, if one is, and the name it is given, if another is."""

    module: str
    name: str | None
    alias: str | None

    @property
    def full(self) -> str:
        """The dotted name of what is imported."""
        return self.module if self.name is None else f"{self.module}.{self.name}"


class Changes(NamedTuple):
    """What is found in one file: the uses, in their order, the source with the certain ones replaced, its other imports."""

    findings: list[Finding]
    after: str
    imports: list[Imported]


class _Replacer(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider, ExpressionContextProvider)

    def __init__(self, bound: bool, own: bool) -> None:
        super().__init__()
        self.found: list[Finding] = []
        self.imports: list[Imported] = []
        self.bound, self.own, self.quoted = bound, own, 0
        self.called: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Note imports, which are not replaced, functions that are called, and where f-strings begin."""
        if isinstance(node, cst.ImportFrom):
            module = "" if node.module is None or node.relative else _EMPTY.code_for_node(node.module)
            names = () if isinstance(node.names, cst.ImportStar) else node.names
            self.imports += [Imported(module, one.evaluated_name, one.evaluated_alias) for one in names]
        elif isinstance(node, cst.Import):
            self.imports += [Imported(one.evaluated_name, None, one.evaluated_alias) for one in node.names]
        elif isinstance(node, cst.FormattedString):
            self.quoted += 1
        elif isinstance(node, cst.Call):
            self.called.add(node.func)
        return not isinstance(node, (cst.Import, cst.ImportFrom))

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Replace calls, and names that are read."""
        if isinstance(original_node, cst.FormattedString):
            self.quoted -= 1
        elif isinstance(original_node, cst.Call):
            return self._used(original_node, updated_node, original_node.func)
        elif isinstance(original_node, (cst.Attribute, cst.Name)) and original_node not in self.called:
            return self._used(original_node, updated_node, original_node)
        return updated_node

    def _used(self, node: Any, updated: Any, name: cst.BaseExpression) -> Any:
        """Note a use of a legacy name; return what replaces it, or where that is not certain or it is none, what stands there."""
        names = [*self.get_metadata(QualifiedNameProvider, name, ())]
        for one in names:
            module, _, leaf = one.name.rpartition(".")
            imported = module and one.source is QualifiedNameSource.IMPORT
            advice = advise(module, leaf, _arguments(node), bound=self.bound) if imported else None
            if advice is not None:
                break
        else:
            return updated
        code = _EMPTY.code_for_node(node)
        old = " ".join(code.split())
        old = leaf + old[old.index("(") :] if isinstance(node, cst.Call) else leaf
        context = self.get_metadata(ExpressionContextProvider, node, ExpressionContext.LOAD)
        if context is not ExpressionContext.LOAD:
            if isinstance(node, cst.Name):
                return updated
            old, advice = f"{leaf} = ...", Advice("", doubt=_ASSIGNED)
        doubts = {
            advice.doubt: bool(advice.doubt),
            "a comment stands between its arguments": "#" in code,
            "the name can be something else here": len(names) > 1,
            f"through {module}, which is not followed": module not in APIS,
            "in an f-string, whose quotation marks may be in the way": self.quoted > 0,
            "the file has a namedmesh of its own": self.own,
        }
        advice = advice._replace(doubt=next((text for text, holds in doubts.items() if holds), ""))
        self.found.append(Finding(self.get_metadata(PositionProvider, node).start.line, old, advice))
        if advice.doubt:
            return updated
        new = re.sub(r"(?<![\w.])mesh\.", "namedmesh.current_mesh().", advice.new)
        return cst.parse_expression(new)  # a call or a subscript: what is certain needs no parentheses


_ASSIGNED = "an assignment changes what legacy calls answer, and no mesh"


def _arguments(node: cst.BaseExpression) -> list[tuple[str, str]] | None:
    """Return the arguments of a call, each a keyword, which may be empty, and its source; None where nothing is called."""
    if not isinstance(node, cst.Call):
        return None
    names = [one.star or (one.keyword.value if one.keyword else "") for one in node.args]
    return [(name, _EMPTY.code_for_node(one.value)) for name, one in zip(names, node.args, strict=True)]


def _own_namedmesh(wrapper: MetadataWrapper) -> bool:
    """Return whether a file binds the name namedmesh to something else than the package."""
    scopes = {scope for scope in wrapper.resolve(ScopeProvider).values() if scope is not None}
    bound = [one for scope in scopes for one in scope.assignments["namedmesh"]]
    package = {QualifiedName("namedmesh", QualifiedNameSource.IMPORT)}
    return any(one.get_qualified_names_for("namedmesh") != package for one in bound)


def change(source: str, *, bound: bool = False, kept: Collection[str] = (), rewrite: bool = True) -> Changes:
    """Find the names of the tables in a source, and replace those that are certain.

    ``initialize_model_parallel`` becomes a mesh, ``bound`` to Megatron. Imports of names that are ``kept`` stay, as other modules
    take them from this one. Without ``rewrite`` the source is returned as it was.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    replacer = _Replacer(bound, _own_namedmesh(wrapper))
    module = wrapper.visit(replacer)
    certain = [finding for finding in replacer.found if not finding.advice.doubt]
    if not certain or not rewrite:
        return Changes(replacer.found, source, replacer.imports)
    context = CodemodContext()
    AddImportsVisitor.add_needed_import(context, "namedmesh")
    if any(".bind(" in finding.advice.new for finding in certain):
        AddImportsVisitor.add_needed_import(context, "namedmesh.compat.megatron")
    module = AddImportsVisitor(context).transform_module(module)
    for one in replacer.imports:
        if (one.module in APIS or one.full in APIS) and (one.alias or one.name) not in kept:
            RemoveImportsVisitor.remove_unused_import(context, *one)
    module = RemoveImportsVisitor(context).transform_module(module)
    return Changes(replacer.found, module.code, replacer.imports)
