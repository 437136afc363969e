"""What one module binds, and which of its expressions may be legacy names, by its syntax tree alone."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh.migrate.apis import API_PATHS, needed_by
from namedmesh.migrate.files import TOO_DEEP, Source, UnreadableError, key_of, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import TypeAlias

USUAL_NAMES = ("parallel_state", "mpu")
"""What code calls the legacy module."""
_DOTTED_PATHS = ("megatron.", "fairscale.", "namedmesh.")
_NAMED_BY_VALUE = ("getattr", "setattr")
_OBJECT_AND_NAME = 2
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class _Scope:
    """A module, class, function or comprehension, and the values that are bound to each name in it."""

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
    Dotted: TypeAlias = frozenset[str | None]


class Use(NamedTuple):
    """An expression that may be a legacy name."""

    node: ast.expr  # a name, attributes, or a string that is a dotted path
    parts: tuple[str, ...]  # the names that it consists of; after a call, those behind it
    dotted: Dotted  # what it can stand for; a ``*`` before a name marks one that only a star import can have bound
    fstring: ast.JoinedStr | None  # the outermost one around it
    argument_of: ast.Call | None  # the call of ``getattr`` and its like whose first argument it is
    call: ast.Call | None  # of it, or of what that returns
    change: str  # how the report shows that it is assigned or deleted; empty if it is not


@dataclass
class Module:
    """One module."""

    source: Source
    names: dict[str, Dotted] = field(default_factory=dict)  # what its global names can stand for
    # Its global names that may be further names of legacy ones
    aliases: list[str] = field(default_factory=list)
    stars: list[str] = field(default_factory=list)  # the modules that it imports everything from
    functions: dict[str, ast.arguments] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    # The line of each import, and the modules that it needs
    imports: list[tuple[int, list[str]]] = field(default_factory=list)


@cache
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


def read_module(source: Source, path: Path, words: frozenset[str]) -> Module:
    """Read one module, by the legacy names and those under which the code base hands them out."""
    try:
        return _Reader(source, path, words).read()
    except RecursionError:
        raise UnreadableError(TOO_DEEP) from None


class _Reader:
    def __init__(self, source: Source, path: Path, words: frozenset[str]) -> None:
        self._words, self._module = words, Module(source)
        self._key, self._is_package = key_of(path), path.stem == "__init__"
        self._scope = self._here = _Scope()  # of the module, and of the node that is looked at
        self._fstring: ast.JoinedStr | None = None  # around that node
        self._stack: list[tuple[ast.AST, _Scope, ast.JoinedStr | None]] = []
        self._elsewhere: list[tuple[_Scope, str, bool]] = []  # the names that are global, or nonlocal
        self._seen: list[tuple[ast.expr, tuple[str, ...], _Scope, ast.JoinedStr | None, ast.Call | None]] = []
        self._calls: dict[ast.expr, ast.Call] = {}  # by the called expression
        self._changes: dict[ast.expr, str] = {}
        self._dotted: dict[tuple[_Scope, str], Dotted] = {}

    def read(self) -> Module:
        """Return the module; names are looked up when all of it was seen, as when it runs."""
        module = self._module
        self._walk(parse(module.source))
        for scope, name, is_global in self._elsewhere:
            owner = self._scope if is_global or not scope.parent else scope.parent.find(name)
            if owner and owner is not scope:
                owner.bindings.setdefault(name, []).extend(scope.bindings.pop(name, ()))
        module.names = {name: self._bound_to(self._scope, name) for name in self._scope.bindings}
        for name in module.names.keys() - self._words:
            if any(map(self._is_near, module.names[name])):
                module.aliases.append(name)
        for node, parts, scope, fstring, argument_of in self._seen:
            is_path = isinstance(node, ast.Constant)
            dotted = frozenset([".".join(parts)]) if is_path else self._dotted_of(node, scope)
            if any(map(self._is_near, dotted)) or any(map(is_usual, parts[-2:])):
                call = self._calls.get(argument_of or node)
                change = "" if argument_of else self._changes.get(node, "")
                module.uses.append(Use(node, parts, dotted, fstring, argument_of, call, change))
        return module

    # What the module has.

    def _walk(self, tree: ast.Module) -> None:
        """Note what each node binds, and each expression that consists of names; in no order."""
        visitors: dict[type[ast.AST], Callable[[Any], Iterable[ast.AST | None]]] = {
            **dict.fromkeys((*_FUNCTIONS, ast.ClassDef, *_COMPREHENSIONS), self._scoped),
            **dict.fromkeys((ast.Import, ast.ImportFrom), self._import),
            **dict.fromkeys((ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr), self._assignment),
            **dict.fromkeys((ast.Global, ast.Nonlocal), self._declaration),
            **dict.fromkeys((ast.Name, ast.Attribute), self._name),
            **dict.fromkeys((ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping), self._target),
            ast.Constant: self._string,
            ast.JoinedStr: self._formatted,
            ast.Call: self._call,
            ast.Delete: self._delete,
        }
        self._stack.append((tree, self._scope, None))
        while self._stack:
            node, self._here, self._fstring = self._stack.pop()
            children = visitors.get(type(node), ast.iter_child_nodes)(node)
            self._stack += [(child, self._here, self._fstring) for child in children if child]

    def _bind(self, name: str, value: _Value = None, scope: _Scope | None = None) -> None:
        (scope or self._here).bindings.setdefault(name, []).append(value)

    def _see(self, node: ast.expr, parts: Iterable[str], argument_of: ast.Call | None = None) -> None:
        self._seen.append((node, tuple(parts), self._here, self._fstring, argument_of))

    def _name(self, node: ast.Name | ast.Attribute) -> list[ast.expr]:
        """Note a name, or attributes; return the expression that they are attributes of, if that is no name."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._bind(node.id)
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
        self._see(node, reversed(parts))
        return left

    def _string(self, node: ast.Constant) -> list[ast.AST]:
        """Note a dotted path in a string, as ``mock.patch`` takes it."""
        if isinstance(node.value, str) and node.value.startswith(_DOTTED_PATHS):
            self._see(node, node.value.split("."))
        return []

    def _formatted(self, node: ast.JoinedStr) -> list[ast.expr]:
        self._fstring = self._fstring or node
        return [part for part in node.values if isinstance(part, ast.FormattedValue)]

    def _call(self, node: ast.Call) -> Iterable[ast.AST]:
        self._calls[node.func] = node
        given = first_arguments(node)
        if len(given) == _OBJECT_AND_NAME:
            is_string = isinstance(given[1], ast.Constant) and isinstance(given[1].value, str)
            name = dotted_name(given[0])
            if name and (is_string or dotted_name(node.func) in _NAMED_BY_VALUE):
                self._see(given[0], name.split("."), node)
        return ast.iter_child_nodes(node)

    def _delete(self, node: ast.Delete) -> list[ast.expr]:
        self._changes |= {one: "del {}" for one in node.targets if isinstance(one, ast.Attribute)}
        return node.targets

    def _target(self, node: Any) -> Iterable[ast.AST]:
        """Bind the name after ``except ... as`` or in a pattern."""
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if name:
            self._bind(name)
        return ast.iter_child_nodes(node)

    def _scoped(self, node: Any) -> list[ast.AST]:
        """Read what has a scope; of functions and classes only the body, of comprehensions everything is in it."""
        inner = _Scope(self._here, node)
        inside, outside = list(ast.iter_child_nodes(node)), list[ast.AST]()
        if not isinstance(node, _COMPREHENSIONS):
            body = node.body if isinstance(node.body, list) else [node.body]
            ids = set(map(id, body))
            inside, outside = body, [one for one in inside if id(one) not in ids]
        self._stack += [(one, inner, self._fstring) for one in inside]
        if hasattr(node, "args"):
            for one in ast.iter_child_nodes(node.args):
                if isinstance(one, ast.arg):
                    self._bind(one.arg, scope=inner)
        if hasattr(node, "name"):
            self._bind(node.name)
            if self._here is self._scope and hasattr(node, "args"):
                self._module.functions[node.name] = node.args
        return outside

    def _import(self, node: ast.Import | ast.ImportFrom) -> list[ast.AST]:
        targets = dict(self._imported(node))
        for name, target in targets.items():
            if name == "*":
                self._module.stars.append(target)
            else:
                self._bind(name, target)
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
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr
    ) -> list[ast.expr | None]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = None if isinstance(node, ast.AugAssign) else node.value
        owner = self._here
        while isinstance(node, ast.NamedExpr) and isinstance(owner.node, _COMPREHENSIONS) and owner.parent:
            owner = owner.parent
        left = [node.value]
        if isinstance(node, ast.AnnAssign):
            left.append(node.annotation)
        for target in targets:
            if isinstance(target, ast.Name):
                self._bind(target.id, (value, self._here) if value else None, owner)
            else:
                self._change(target)
                left.append(target)
        return left

    def _change(self, target: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._change(element)
        elif isinstance(target, ast.Attribute):
            self._changes[target] = "{} = ..."

    def _declaration(self, node: ast.Global | ast.Nonlocal) -> list[ast.AST]:
        self._elsewhere += [(self._here, name, isinstance(node, ast.Global)) for name in node.names]
        return []

    # What its names stand for.

    def _is_near(self, dotted: str | None) -> bool:
        """Return whether a dotted name may be a legacy one, or what has them."""
        if not dotted:
            return False
        return dotted in API_PATHS or not self._words.isdisjoint(dotted.split("."))

    def _dotted_of(self, node: ast.expr, scope: _Scope) -> Dotted:
        """Return the dotted names that an expression can be; None stands for anything else but the literal None."""
        if isinstance(node, ast.Constant) and node.value is None:
            return frozenset()
        values = _values_of(node)
        if values:
            return frozenset().union(*(self._dotted_of(value, scope) for value in values))
        name, _, rest = dotted_name(node).partition(".")
        owner = scope.find(name)
        if owner:
            found = self._bound_to(owner, name)
        elif name and not name.startswith("_") and self._module.stars:  # these bind no private names
            found = frozenset(f"*{star}.{name}" for star in self._module.stars)
        else:
            return frozenset([None])
        return frozenset(f"{one}.{rest}" if one and rest else one for one in found)

    def _bound_to(self, scope: _Scope, name: str) -> Dotted:
        key = (scope, name)
        if key not in self._dotted:
            self._dotted[key] = frozenset([None])  # for a name that is assigned to itself
            found: set[str | None] = set()
            for value in scope.bindings[name]:
                found |= self._dotted_of(*value) if isinstance(value, tuple) else {value}
            self._dotted[key] = frozenset(found)
        return self._dotted[key]


def _values_of(node: ast.expr) -> list[ast.expr] | None:
    """Return the values that an expression chooses from; None if it is no choice."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return node.values if isinstance(node, ast.BoolOp) else None
