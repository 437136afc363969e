"""What names stand for: the legacy module, something of it, or neither, by the imports and bindings of each scope."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from namedmesh.migrate.rules import DIALECT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", DIALECT)
PARENTS = frozenset(
    ".".join(parts[:n])
    for parts in (module.split(".") for module in MODULES)
    for n in range(1, len(parts) + 1)
)
USUAL_NAMES = ("parallel_state", "mpu")


@dataclass(frozen=True)
class Origin:
    """The dotted name that an expression stands for, and whether imports determine it."""

    dotted: str
    certain: bool = True

    def attribute(self, name: str) -> Origin:
        """Return the origin of an attribute of this."""
        return replace(self, dotted=f"{self.dotted}.{name}")

    @property
    def legacy(self) -> str | None:
        """The name inside the legacy module; the empty string for the module itself, None outside of it."""
        for module in MODULES:
            if f"{self.dotted}.".startswith(f"{module}."):
                return self.dotted[len(module) + 1 :]
        return None


Exports = Mapping[str, Mapping[str, Origin]]
"""For each module of a code base what it has of the legacy module, by name."""


class _Scope:
    """The names that one module, class or function binds; None for what is bound to something else."""

    def __init__(self, *, is_class: bool) -> None:
        self.bound: dict[str, Origin | None] = {}
        self.star = False
        self.is_class = is_class

    def bind(self, name: str, origin: Origin | None) -> None:
        """Record a binding. A known origin takes precedence: ``mpu = None`` replaces an import that failed."""
        if origin is not None or name not in self.bound:
            self.bound[name] = origin


class Scopes:
    """The scopes around one line of the code, the module's first.

    Args:
        exports: what modules of the code base have of the legacy module, by name.
        module: the name of this module, for relative imports; a package's ends in ``.__init__``.
    """

    def __init__(self, exports: Exports | None = None, module: str = "") -> None:
        self._exports, self._module = exports or {}, module
        self._stack: list[_Scope] = []

    def bound(self) -> dict[str, Origin]:
        """Return what the innermost scope has of the legacy module."""
        bound = self._stack[-1].bound.items()
        return {name: origin for name, origin in bound if origin is not None and origin.legacy is not None}

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

    def origin(self, node: ast.expr) -> Origin | None:
        """Return the origin of an expression; None where it is not known."""
        if isinstance(node, ast.Name):
            for depth, scope in enumerate(reversed(self._stack)):
                if node.id in scope.bound and (depth == 0 or not scope.is_class):
                    return scope.bound[node.id]
        if isinstance(node, ast.Attribute):
            base = self.origin(node.value)
            if base is not None:
                return self._follow(base.attribute(node.attr))
            if has_usual_name(node.value):
                return Origin(f"{MODULES[0]}.{node.attr}", certain=False)
        return None

    def _follow(self, origin: Origin) -> Origin:
        """Return the origin of what a module of the code base has under a name."""
        module, _, name = origin.dotted.rpartition(".")
        return self._exports.get(module, {}).get(name, origin)

    def from_star_import(self, name: str) -> bool:
        """Return whether a name that nothing else binds can come from ``import *``."""
        return not any(name in scope.bound for scope in self._stack) and any(
            scope.star for scope in self._stack
        )

    def _record(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                dotted = alias.name if alias.asname else alias.name.split(".")[0]
                own = any(f"{module}.".startswith(f"{dotted}.") for module in self._exports)
                scope.bind(alias.asname or dotted, Origin(dotted) if own or dotted in PARENTS else None)
        elif isinstance(node, ast.ImportFrom):
            self._record_import_from(node, scope)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bind(node.name, None)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            origin = self.origin(node.value) if node.value else None
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    scope.bind(target.id, origin)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            scope.bind(node.id, None)

    def _record_import_from(self, node: ast.ImportFrom, scope: _Scope) -> None:
        module = node.module or ""
        if node.level:
            around = ".".join(self._module.split(".")[: -node.level])
            module = ".".join(part for part in (around, module) if part)
        own = self._exports.get(module, {})
        base = Origin(module)
        if node.level and not own and (node.module or "").split(".")[-1] in USUAL_NAMES:
            base = Origin(MODULES[0], certain=False)
        for alias in node.names:
            if alias.name == "*":
                scope.star = scope.star or base.legacy == ""
                for name, origin in own.items():
                    scope.bind(name, origin)
                continue
            origin = self._follow(base.attribute(alias.name))
            inside = any(f"{known}.".startswith(f"{origin.dotted}.") for known in self._exports)
            known = origin.legacy is not None or origin.dotted in PARENTS or inside
            scope.bind(alias.asname or alias.name, origin if known else None)


def has_usual_name(node: ast.expr) -> bool:
    """Return whether an expression is named as the legacy module: ``mpu``, ``self.mpu``, ``cfg.parallel_state``."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return any(name.strip("_") == usual or name.endswith(f"_{usual}") for usual in USUAL_NAMES)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, without the bodies of functions and classes, which have their own scopes."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _own_nodes(child)


def exported(sources: Sequence[tuple[tuple[str, ...], ast.Module]]) -> Exports:
    """Return what each module of a code base has of the legacy module, directly or from another of its modules.

    Args:
        sources: the names of each module and its tree.

    Example:
        >>> trees = [ast.parse("from megatron.core import mpu"), ast.parse("from a import mpu as state")]
        >>> exported([(("a",), trees[0]), (("b",), trees[1])])["b"]["state"].dotted
        'megatron.core.mpu'
    """
    exports: dict[str, Mapping[str, Origin]] = {}
    changed = True
    while changed:
        changed = False
        for names, tree in sources:
            scopes = Scopes(exports, names[0])
            scopes.enter(tree.body)
            bound = scopes.bound()
            if bound and bound != exports.get(names[0].removesuffix(".__init__")):
                exports |= dict.fromkeys((name.removesuffix(".__init__") for name in names), bound)
                changed = True
    return exports
