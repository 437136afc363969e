"""What a name in a module stands for, as far as imports and plain assignments tell."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.migrate.rules import DIALECT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MODULES", "Origin", "Scope", "Scopes", "is_hint"]

MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", DIALECT)
"""The dotted names of the legacy module."""

_PARENTS = frozenset(
    ".".join(parts[:n])
    for parts in (module.split(".") for module in MODULES)
    for n in range(1, len(parts) + 1)
)
_HINTS = ("mpu", "parallel_state")


@dataclass(frozen=True)
class Origin:
    """A dotted name, and whether the code says so or only sounds like it."""

    dotted: str
    certain: bool = True

    def attribute(self, name: str) -> Origin:
        """An attribute of it.

        Example:
            >>> Origin("megatron").attribute("core")
            Origin(dotted='megatron.core', certain=True)
        """
        return Origin(f"{self.dotted}.{name}", self.certain)

    @property
    def legacy(self) -> str | None:
        """The name inside the legacy module; the empty string for the module itself.

        Example:
            >>> Origin("megatron.core.mpu.get_x").legacy, Origin("megatron.core.mpu").legacy, Origin("os").legacy
            ('get_x', '', None)
        """
        for module in MODULES:
            if self.dotted == module:
                return ""
            if self.dotted.startswith(f"{module}."):
                return self.dotted[len(module) + 1 :]
        return None


class Scope:
    """The names that one module, class or function binds; None for what is bound to something else."""

    def __init__(self, *, is_class: bool = False) -> None:
        self.bound: dict[str, Origin | None] = {}
        self.star = False
        self.is_class = is_class

    def bind(self, name: str, origin: Origin | None) -> None:
        """Note a binding. One that leads somewhere wins over others: ``mpu = None`` stands in for an import."""
        if origin is not None or name not in self.bound:
            self.bound[name] = origin


class Scopes:
    """The scopes around one place in the code, the module's first.

    Example:
        >>> scopes = Scopes()
        >>> scopes.enter(ast.parse("from megatron.core import parallel_state as ps").body)
        >>> scopes.origin(ast.parse("ps.get_x", mode="eval").body)
        Origin(dotted='megatron.core.parallel_state.get_x', certain=True)
    """

    def __init__(self) -> None:
        self._stack: list[Scope] = []

    def enter(
        self, body: Sequence[ast.AST], parameters: Sequence[str] = (), *, is_class: bool = False
    ) -> None:
        """Enter the scope of a body, after reading all of it: a function may use what is bound further down."""
        scope = Scope(is_class=is_class)
        self._stack.append(scope)
        for name in parameters:
            scope.bind(name, None)
        for statement in body:
            for node in _own_nodes(statement):
                self._learn(node, scope)

    def leave(self) -> None:
        """Leave the innermost scope."""
        self._stack.pop()

    def origin(self, node: ast.expr) -> Origin | None:
        """Where an expression comes from; None where that is not known."""
        if isinstance(node, ast.Name):
            return self._lookup(node.id)
        if isinstance(node, ast.Attribute):
            base = self.origin(node.value)
            if base is not None:
                return base.attribute(node.attr)
            if is_hint(node.value):
                return Origin(f"{MODULES[0]}.{node.attr}", certain=False)
        return None

    def starred(self, name: str) -> bool:
        """Whether a name that nothing else binds can have come with ``import *``."""
        return not any(name in scope.bound for scope in self._stack) and any(
            scope.star for scope in self._stack
        )

    def _lookup(self, name: str) -> Origin | None:
        for place, scope in enumerate(reversed(self._stack)):
            if name in scope.bound and (place == 0 or not scope.is_class):
                return scope.bound[name]
        return None

    def _learn(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                _learn_import(alias, scope)
        elif isinstance(node, ast.ImportFrom):
            _learn_import_from(node, scope)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bind(node.name, None)
        elif isinstance(node, ast.Assign):
            origin = self.origin(node.value)
            for target in node.targets:
                _learn_target(target, origin, scope)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            _learn_target(node.target, self.origin(node.value) if node.value else None, scope)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            scope.bind(node.id, None)


def is_hint(node: ast.expr) -> bool:
    """Whether an expression sounds like the legacy module: ``mpu``, ``self.mpu``, ``cfg.parallel_state``.

    Example:
        >>> is_hint(ast.parse("self.mpu", mode="eval").body), is_hint(ast.parse("self.grid", mode="eval").body)
        (True, False)
    """
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return any(name.strip("_") == hint or name.endswith(f"_{hint}") for hint in _HINTS)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is below it, without the bodies of functions and classes: these are scopes of their own."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _own_nodes(child)


def _learn_import(alias: ast.alias, scope: Scope) -> None:
    tracked = alias.name in _PARENTS
    if alias.asname is not None:
        scope.bind(alias.asname, Origin(alias.name) if tracked else None)
    else:
        first = alias.name.split(".")[0]
        scope.bind(first, Origin(first) if first in _PARENTS else None)


def _learn_import_from(node: ast.ImportFrom, scope: Scope) -> None:
    for alias in node.names:
        if node.level == 0:
            origin = Origin(node.module or "")
        elif (node.module or "").split(".")[-1] in _HINTS:
            origin = Origin(MODULES[0], certain=False)
        else:
            origin = Origin("")
        if alias.name == "*":
            scope.star = scope.star or origin.legacy == ""
            continue
        made = origin.attribute(alias.name)
        known = made.legacy is not None or made.dotted in _PARENTS
        scope.bind(alias.asname or alias.name, made if known else None)


def _learn_target(target: ast.expr, origin: Origin | None, scope: Scope) -> None:
    if isinstance(target, ast.Name):
        scope.bind(target.id, origin)
