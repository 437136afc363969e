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
    QualifiedNameProvider,
    QualifiedNameSource,
    ScopeProvider,
)

from namedmesh.migrate.table import APIS, FAIRSCALE, MEGATRON, Advice, initialize

if TYPE_CHECKING:
    from collections.abc import Collection

    from namedmesh.migrate.table import Row

MARKS = re.compile(
    rb"\b(?:parallel_state|mpu|megatron\.core|fairscale|(?:get|is|initialize)_\w*(?:parallel|pipeline)_\w+)\b"
)
"""What stands in every file that can name something of the tables: others are not parsed."""
_INITIALIZE = "initialize_model_parallel"
_EMPTY = cst.Module([])
_SUBMODULES = {module.rpartition(".")[2] for module in APIS}


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

    @property
    def of_api(self) -> bool:
        """Whether it is an API, or something of one."""
        return self.module in APIS or self.full in APIS


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
            if not isinstance(node.names, cst.ImportStar):
                self.imports += [
                    Imported(module, one.evaluated_name, one.evaluated_alias) for one in node.names
                ]
        elif isinstance(node, cst.Import):
            self.imports += [Imported(one.evaluated_name, None, one.evaluated_alias) for one in node.names]
        elif isinstance(node, cst.FormattedString):
            self.quoted += 1
        elif isinstance(node, cst.Call):
            self.called.add(node.func)
        return not isinstance(node, (cst.Import, cst.ImportFrom))

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Replace a call, or a name that is read."""
        if isinstance(original_node, cst.FormattedString):
            self.quoted -= 1
        elif isinstance(original_node, cst.Call):
            return self._call(original_node, updated_node, *self._name(original_node.func))
        elif isinstance(original_node, (cst.Attribute, cst.Name)) and original_node not in self.called:
            return self._read(original_node, updated_node, *self._name(original_node))
        return updated_node

    def _call(self, node: cst.Call, updated: cst.Call, module: str, leaf: str) -> cst.BaseExpression:
        if not leaf:
            return updated
        arguments = []
        for one in node.args:
            name = one.star or (one.keyword.value if one.keyword else "")
            arguments.append((name, _EMPTY.code_for_node(one.value)))
        row = _row(module, leaf)
        advice = _UNKNOWN if row is None else row.advise(arguments)
        if leaf == _INITIALIZE:
            advice = initialize(module, arguments, bound=self.bound)
        code = _EMPTY.code_for_node(node)
        if "#" in code and not advice.doubt:
            advice = advice._replace(doubt="a comment stands between its arguments")
        old = " ".join(code.split())
        return self._replaced(node, updated, f"{leaf}{old[old.index('(') :]}", advice)

    def _read(
        self, node: cst.BaseExpression, updated: cst.BaseExpression, module: str, leaf: str
    ) -> cst.BaseExpression:
        """Replace a variable that is read; what is assigned, and a function that is passed on, stays."""
        if not leaf:
            return updated
        row = _row(module, leaf)
        advice = _UNKNOWN if row is None else row.advise()
        if row is not None and not leaf.startswith("_"):
            advice = advice._replace(doubt="passed on, not called: its arguments are given elsewhere")
        context = self.get_metadata(ExpressionContextProvider, node, ExpressionContext.LOAD)
        if context is not ExpressionContext.LOAD:
            if isinstance(node, cst.Name):
                return updated
            advice = Advice("", doubt="an assignment changes what legacy calls answer, and no mesh")
            leaf = f"{leaf} = ..."
        return self._replaced(node, updated, leaf, advice)

    def _replaced(
        self, node: cst.BaseExpression, updated: cst.BaseExpression, old: str, advice: Advice
    ) -> cst.BaseExpression:
        """Note a use, and return what replaces it, or where that is not certain, what stands there."""
        named = node.func if isinstance(node, cst.Call) else node
        names = [one.name for one in self.get_metadata(QualifiedNameProvider, named)]
        module = names[0].rpartition(".")[0]
        doubts = [
            (advice.doubt != "", advice.doubt),
            (len(names) > 1, "the name can be something else here"),
            (module not in APIS, f"through {module}, which is not followed"),
            (self.quoted > 0, "in an f-string, whose quotation marks may be in the way"),
            (self.own, "the file has a namedmesh of its own"),
        ]
        advice = advice._replace(doubt=next((text for holds, text in doubts if holds), ""))
        line = self.get_metadata(PositionProvider, node).start.line
        self.found.append(Finding(line, old, advice))
        if advice.doubt:
            return updated
        new = re.sub(r"(?<![\w.])mesh\.", "namedmesh.current_mesh().", advice.new)
        expression = cst.parse_expression(new)
        if isinstance(expression, (cst.Call, cst.Attribute, cst.Subscript)):
            return expression
        return expression.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])

    def _name(self, node: cst.CSTNode) -> tuple[str, str]:
        """Return the module and the name of an imported thing that an API or a table has; empty if it is none."""
        for one in self.get_metadata(QualifiedNameProvider, node, ()):
            module, _, leaf = one.name.rpartition(".")
            known = leaf == _INITIALIZE or _row(module, leaf) is not None
            known = known or (module in APIS and leaf not in _SUBMODULES)
            if one.source is QualifiedNameSource.IMPORT and module and known:
                return module, leaf
        return "", ""


_UNKNOWN = Advice("", doubt="not in the table: it stays")


def _row(module: str, leaf: str) -> Row | None:
    table = APIS.get(module)
    if table is None:  # a name that only a module of the code itself can hand on
        table = MEGATRON | FAIRSCALE if "parallel" in leaf.lower() else {}
    return table.get(leaf)


def _own_namedmesh(wrapper: MetadataWrapper) -> bool:
    """Return whether a file binds the name namedmesh to something else than the package."""
    scopes = {scope for scope in wrapper.resolve(ScopeProvider).values() if scope is not None}
    nodes = [getattr(one, "node", None) for scope in scopes for one in scope.assignments["namedmesh"]]
    imported = [node for node in nodes if isinstance(node, cst.Import)]
    names = {
        one.evaluated_name for node in imported for one in node.names if one.evaluated_alias == "namedmesh"
    }
    return len(imported) < len(nodes) or bool(names)


def change(source: str, *, bound: bool = False, kept: Collection[str] = (), rewrite: bool = True) -> Changes:
    """Find the names of the tables in a source, and replace those that are certain.

    ``initialize_model_parallel`` becomes a mesh, ``bound`` to Megatron. Imports of names that are ``kept`` stay, as other modules
    take them from this one. Without ``rewrite`` the source is returned as it was.

    Raises:
        libcst.ParserSyntaxError: the source is no Python.
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
        if one.of_api and (one.alias or one.name) not in kept:
            RemoveImportsVisitor.remove_unused_import(context, *one)
    return Changes(
        replacer.found, RemoveImportsVisitor(context).transform_module(module).code, replacer.imports
    )
