"""What one module binds, and which of its expressions may be legacy names, by its syntax tree alone."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from namedmesh.migrate.apis import API_PATHS, needed_by
from namedmesh.migrate.files import Source, key_of
from namedmesh.migrate.positions import Positions
from namedmesh.migrate.rules import Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from namedmesh.migrate.positions import Position

USUAL_NAMES = ("parallel_state", "mpu")
"""What code calls the legacy module."""
_USUAL = re.compile(r"\w*(?:parallel_state|mpu)_*\b")
_DOTTED_PATHS = ("megatron.", "fairscale.", "namedmesh.")
_NAMED_BY_VALUE = ("getattr", "setattr")
_OBJECT_AND_NAME = 2
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Use(NamedTuple):
    """An expression that may be a legacy name.

    Args:
        parts: the names that it consists of; after a call, those behind it.
        dotted: the dotted names that it can stand for. None is anything else; a ``*`` before a name marks one that only
            a star import can have bound.
        position: the place of the expression, or of the call of it.
        code: what stands there.
        is_called: whether that is the call of it.
        kind: a name, a string that is a dotted path, or the first argument of ``getattr`` and its like.
        change: how the report shows that it is assigned or deleted; empty if it is not.
    """

    parts: tuple[str, ...]
    dotted: frozenset[str | None]
    position: Position
    code: str
    is_called: bool
    kind: Literal["name", "path", "argument"]
    change: str = ""


@dataclass
class Module:
    """One module.

    Args:
        source: where it is; its code is left out.
        names: the dotted names that each of its global names is bound to; None stands for anything else.
        aliases: its global names that may be further names of legacy ones.
        stars: the modules that it imports everything from.
        functions: the parameters of its functions that have a legacy name.
        uses: its expressions that may be legacy names.
        imports: the line of each import, and the modules that it needs.
    """

    source: Source
    names: dict[str, frozenset[str | None]] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)
    stars: list[str] = field(default_factory=list)
    functions: dict[str, Signature] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    imports: list[tuple[int, list[str]]] = field(default_factory=list)


class _Scope:
    """A module, class, function or comprehension, and what is bound to each name in it.

    That is a dotted name, an expression with its scope, or None for anything else.
    """

    def __init__(self, parent: _Scope | None = None, node: ast.AST | None = None) -> None:
        self.parent, self.node = parent, node
        self.bindings: dict[str, list[_Value]] = {}

    def find(self, name: str) -> _Scope | None:
        """Return the scope whose name it is; functions do not see the names of the class around them."""
        if name in self.bindings:
            return self
        scope = self.parent
        while scope and (isinstance(scope.node, ast.ClassDef) or name not in scope.bindings):
            scope = scope.parent
        return scope


if TYPE_CHECKING:
    _Value: TypeAlias = str | tuple[ast.expr, _Scope] | None
    _Nodes: TypeAlias = list[tuple[ast.AST | None, _Scope]]


class _Seen(NamedTuple):
    """An expression that consists of names, its scope, and the outermost f-string around it."""

    node: ast.expr
    parts: tuple[str, ...]
    scope: _Scope
    fstring: ast.JoinedStr | None
    by_string: ast.Call | None = None


def is_usual(name: str) -> bool:
    """Return whether code has the legacy module under a name like this."""
    return any(name.strip("_") == usual or name.endswith(f"_{usual}") for usual in USUAL_NAMES)


def dotted_name(node: ast.AST | None) -> str:
    """Return a name, or attributes of one, with dots; nothing of any other expression."""
    if isinstance(node, ast.Attribute):
        before = dotted_name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def first_arguments(call: ast.Call) -> list[ast.expr]:
    """Return the first two arguments of a call, with or without a keyword."""
    return [*call.args, *(keyword.value for keyword in call.keywords)][:_OBJECT_AND_NAME]


def _values_of(node: ast.expr) -> list[ast.expr] | None:
    """Return the values that an expression chooses from; None if it is no choice."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return node.values if isinstance(node, ast.BoolOp) else None


class Reader:
    """Reads one module.

    Args:
        source: its code.
        path: its file.
        words: the legacy names, and those under which the code base is known to hand them out.
    """

    def __init__(self, source: Source, path: Path, words: frozenset[str]) -> None:
        self._source, self._words = source, words
        self._key, self._is_package = key_of(path), path.stem == "__init__"
        self._scope = _Scope()
        self._links: list[tuple[str, list[str]]] = []  # the names, and the parts of what is bound to them
        self._elsewhere: list[tuple[_Scope, str, bool]] = []  # the names that are global, or nonlocal
        self._seen: list[_Seen] = []
        self._calls: dict[ast.expr, ast.Call] = {}  # by the called expression
        self._changes: dict[ast.expr, str] = {}
        self._dotted: dict[tuple[_Scope, str], frozenset[str | None]] = {}
        self._module = Module(replace(source, code=b""))

    def read(self, tree: ast.Module) -> Module:
        """Return the module of a syntax tree; names are looked up when all of it was seen, as when it runs."""
        self._walk(tree)
        for scope, name, is_global in self._elsewhere:
            owner = self._scope if is_global or not scope.parent else scope.parent.find(name)
            if owner and owner is not scope:
                owner.bindings.setdefault(name, []).extend(scope.bindings.pop(name, ()))
        near = self._near()
        module = self._module
        module.names = {name: self._bound_to(self._scope, name) for name in self._scope.bindings}
        module.aliases = [name for name in module.names if name in near and name not in self._words]
        seen = [one for one in self._seen if not near.isdisjoint(one.parts)]
        positions = Positions(self._source)
        for one in seen:
            is_path = isinstance(one.node, ast.Constant)
            dotted = frozenset([".".join(one.parts)]) if is_path else self._dotted_of(one.node, one.scope)
            if dotted == {None} and not any(map(is_usual, one.parts[-2:])):
                continue
            place = one.by_string or one.node
            call = self._calls.get(place)
            position = positions.of(call or place, one.fstring)
            kind: Literal["name", "path", "argument"] = "path" if is_path else "name"
            if one.by_string:
                kind = "argument"
            change = "" if one.by_string else self._changes.get(one.node, "")
            code = positions.text(position)
            module.uses.append(Use(one.parts, dotted, position, code, call is not None, kind, change))
        return module

    # What the module has.

    def _walk(self, tree: ast.Module) -> None:
        """Note what each node binds, and each expression that consists of names; in no order."""
        visitors: dict[type[ast.AST], Callable[[Any, _Scope], _Nodes]] = {
            **dict.fromkeys((*_FUNCTIONS, ast.ClassDef, *_COMPREHENSIONS), self._scoped),
            **dict.fromkeys((ast.Import, ast.ImportFrom), self._import),
            **dict.fromkeys((ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr), self._assignment),
            **dict.fromkeys((ast.Global, ast.Nonlocal), self._declaration),
        }
        stack: list[tuple[ast.AST, _Scope, ast.JoinedStr | None]] = [(tree, self._scope, None)]
        while stack:
            node, scope, fstring = stack.pop()
            if type(node) in visitors:
                nodes = visitors[type(node)](node, scope)
                stack += [(child, inner, fstring) for child, inner in nodes if child]
            elif isinstance(node, ast.JoinedStr):
                parts = [part for part in node.values if isinstance(part, ast.FormattedValue)]
                stack += [(part, scope, fstring or node) for part in parts]
            else:
                stack += [(child, scope, fstring) for child in self._expression(node, scope, fstring)]

    def _expression(self, node: ast.AST, scope: _Scope, fstring: ast.JoinedStr | None) -> Iterable[ast.AST]:
        """Note a node that has no scope of its own, and return the nodes in it that are still to be seen."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._name(node, scope, fstring)
        if isinstance(node, ast.Constant):
            # As mock.patch takes them.
            if isinstance(node.value, str) and node.value.startswith(_DOTTED_PATHS):
                self._seen.append(_Seen(node, tuple(node.value.split(".")), scope, fstring))
            return ()
        if isinstance(node, ast.Call):
            self._call(node, scope, fstring)
        elif isinstance(node, ast.Delete):
            self._changes |= {one: "del {}" for one in node.targets if isinstance(one, ast.Attribute)}
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            self._bind(scope, node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self._bind(scope, node.rest)
        return ast.iter_child_nodes(node)

    def _bind(self, scope: _Scope, name: str, value: _Value = None) -> None:
        scope.bindings.setdefault(name, []).append(value)

    def _name(
        self, node: ast.Name | ast.Attribute, scope: _Scope, fstring: ast.JoinedStr | None
    ) -> list[ast.expr]:
        """Note a name, or attributes; return the expression that they are attributes of, if that is no name."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._bind(scope, node.id)
            return []
        parts: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        left = [inner]
        if isinstance(inner, ast.Name):
            parts.append(inner.id)
            left = []
        self._seen.append(_Seen(node, tuple(reversed(parts)), scope, fstring))
        return left

    def _call(self, node: ast.Call, scope: _Scope, fstring: ast.JoinedStr | None) -> None:
        self._calls[node.func] = node
        given = first_arguments(node)
        if len(given) == _OBJECT_AND_NAME:
            is_string = isinstance(given[1], ast.Constant) and isinstance(given[1].value, str)
            parts = dotted_name(given[0])
            if parts and (is_string or dotted_name(node.func) in _NAMED_BY_VALUE):
                self._seen.append(_Seen(given[0], tuple(parts.split(".")), scope, fstring, node))

    def _scoped(self, node: Any, scope: _Scope) -> _Nodes:
        """Read what has a scope; of functions and classes only the body, of comprehensions everything is in it."""
        inner = _Scope(scope, node)
        body = list(ast.iter_child_nodes(node))
        outside: list[ast.AST] = []
        if not isinstance(node, _COMPREHENSIONS):
            own = node.body if isinstance(node.body, list) else [node.body]
            inside = set(map(id, own))
            body, outside = own, [one for one in body if id(one) not in inside]
        if hasattr(node, "args"):
            for one in ast.iter_child_nodes(node.args):
                if isinstance(one, ast.arg):
                    self._bind(inner, one.arg)
        if hasattr(node, "name"):
            self._bind(scope, node.name)
            if scope is self._scope and node.name in self._words and hasattr(node, "args"):
                self._module.functions[node.name] = Signature.of(node.args)
        return [*((one, inner) for one in body), *((one, scope) for one in outside)]

    def _import(self, node: ast.Import | ast.ImportFrom, scope: _Scope) -> _Nodes:
        targets = dict(self._imported(node))
        for name, target in targets.items():
            if name == "*":
                self._module.stars.append(target)
            else:
                self._bind(scope, name, target)
                self._links.append((name, [target, *target.split(".")]))
        self._module.imports += needed_by(node, targets)
        return []

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
        """Yield each name that an import binds, and what it stands for; ``*`` for everything of a module."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
            return
        module = node.module or ""
        if node.level:
            around = self._key.split(".")
            around = around[: len(around) + self._is_package - node.level]
            module = ".".join([*around, module] if module else around)
        for alias in node.names:
            yield alias.asname or alias.name, module if alias.name == "*" else f"{module}.{alias.name}"

    def _assignment(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr, scope: _Scope
    ) -> _Nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = None if isinstance(node, ast.AugAssign) else node.value
        owner = scope
        while isinstance(node, ast.NamedExpr) and isinstance(owner.node, _COMPREHENSIONS) and owner.parent:
            owner = owner.parent
        nodes: _Nodes = [(node.value, scope)]
        if isinstance(node, ast.AnnAssign):
            nodes.append((node.annotation, scope))
        for target in targets:
            if isinstance(target, ast.Name):
                self._bind(owner, target.id, (value, scope) if value else None)
                if value:
                    self._links.append((target.id, list(_parts(value))))
            else:
                self._change(target)
                nodes.append((target, scope))
        return nodes

    def _change(self, target: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._change(element)
        elif isinstance(target, ast.Attribute):
            self._changes[target] = "{} = ..."

    def _declaration(self, node: ast.Global | ast.Nonlocal, scope: _Scope) -> _Nodes:
        self._elsewhere += [(scope, name, isinstance(node, ast.Global)) for name in node.names]
        return []

    # What its names stand for.

    def _near(self) -> set[str]:
        """Return the names that may have to do with a legacy one: it, the usual ones, and what is bound to one of them."""
        near = {*self._words, *API_PATHS}
        near.update(filter(is_usual, _USUAL.findall(self._source.text)))
        found: set[str] | None = None
        while found is None or found:
            found = {name for name, parts in self._links if name not in near and not near.isdisjoint(parts)}
            near |= found
        return near

    def _dotted_of(self, node: ast.expr, scope: _Scope) -> frozenset[str | None]:
        """Return the dotted names that an expression can be; None stands for anything else but the literal None."""
        if isinstance(node, ast.Constant) and node.value is None:
            return frozenset()
        values = _values_of(node)
        if values:
            return frozenset().union(*(self._dotted_of(value, scope) for value in values))
        name, _, rest = dotted_name(node).partition(".")
        if not name:
            return frozenset([None])
        owner = scope.find(name)
        found = self._bound_to(owner, name) if owner else self._unbound(name)
        return frozenset(f"{one}.{rest}" if one and rest else one for one in found)

    def _bound_to(self, scope: _Scope, name: str) -> frozenset[str | None]:
        key = (scope, name)
        if key not in self._dotted:
            self._dotted[key] = frozenset([None])  # for a name that is assigned to itself
            found: set[str | None] = set()
            for value in scope.bindings[name]:
                found |= self._dotted_of(*value) if isinstance(value, tuple) else {value}
            self._dotted[key] = frozenset(found)
        return self._dotted[key]

    def _unbound(self, name: str) -> frozenset[str | None]:
        """Return what a name may be that only a star import can have bound; these bind no private names."""
        stars = [] if name.startswith("_") else self._module.stars
        return frozenset(f"*{star}.{name}" for star in stars) or frozenset([None])


def _parts(node: ast.expr) -> Iterator[str]:
    for value in _values_of(node) or ():
        yield from _parts(value)
    yield from dotted_name(node).split(".")
