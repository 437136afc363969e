"""What dotted names stand for: something of a legacy API, also by way of the scanned modules, or something else."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import libcst as cst
from libcst.helpers import get_full_name_for_node

from namedmesh.migrate.apis import APIS, GPT_NEOX_MPU, MEGATRON, Api
from namedmesh.migrate.files import UnreadableError, check_syntax, key_of, module_names, read
from namedmesh.migrate.rules import Signature

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

USUAL_NAMES = ("parallel_state", "mpu")
"""What code calls the legacy module."""
_NOT_NEOX = "get_pipe_parallel_group"


class Legacy(NamedTuple):
    """A name of a legacy API; the empty name is the module itself."""

    api: Api
    name: str


@dataclass
class Exports:
    """What the outermost level of one module binds.

    Args:
        names: for each name the dotted names that it is bound to; None stands for anything else.
        stars: the modules that it imports everything from.
        functions: the source of the parameters of each function, with its name.
    """

    names: dict[str, list[str | None]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)


def imported(node: cst.Import | cst.ImportFrom, key: str, *, is_package: bool) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, and what it stands for; ``*`` for everything of a module.

    Args:
        node: the import.
        key: the key of the module that it stands in, for relative imports.
        is_package: whether that is a package's ``__init__``.
    """
    if isinstance(node, cst.Import):
        for alias in node.names:
            dotted = alias.evaluated_name
            yield (
                (alias.evaluated_alias, dotted) if alias.evaluated_alias else (dotted.partition(".")[0],) * 2
            )
        return
    module = get_full_name_for_node(node.module) or "" if node.module else ""
    if node.relative:
        around = key.split(".")
        around = around[: len(around) + is_package - len(node.relative)]
        module = ".".join([*around, *module.split(".")] if module else around)
    if isinstance(node.names, cst.ImportStar):
        yield "*", module
        return
    for alias in node.names:
        yield alias.evaluated_alias or alias.evaluated_name, f"{module}.{alias.evaluated_name}"


class _ExportsVisitor(cst.CSTVisitor):
    def __init__(self, module: cst.Module, key: str, *, is_package: bool) -> None:
        super().__init__()
        self.exports = Exports()
        self._module, self._key, self._is_package = module, key, is_package

    def _bind(self, name: str, dotted: str | None) -> None:
        self.exports.names.setdefault(name, []).append(dotted)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Note what a statement binds; functions and classes have scopes of their own."""
        match node:
            case cst.FunctionDef():
                parameters = self._module.code_for_node(node.params)  # may end in a comment
                self.exports.functions[node.name.value] = f"{node.name.value}({parameters}\n)"
                self._bind(node.name.value, None)
                return False
            case cst.ClassDef():
                self._bind(node.name.value, None)
                return False
            case cst.Import() | cst.ImportFrom():
                for name, dotted in imported(node, self._key, is_package=self._is_package):
                    if name == "*":
                        self.exports.stars.append(dotted)
                    else:
                        self._bind(name, dotted)
                return False
            case cst.Assign() if not is_none(node.value):
                dotted_value = get_full_name_for_node(node.value) if is_dotted(node.value) else None
                for target in node.targets:
                    own = dotted_value and dotted_value != get_full_name_for_node(target.target)
                    if isinstance(target.target, cst.Name):
                        self._bind(target.target.value, f"{self._key}.{dotted_value}" if own else None)
                return False
            case _:
                return True


def is_dotted(node: cst.BaseExpression) -> bool:
    """Return whether an expression is a name, or attributes of one."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def is_none(node: cst.BaseExpression) -> bool:
    """Return whether an expression is the literal None."""
    return isinstance(node, cst.Name) and node.value == "None"


def has_usual_name(node: cst.BaseExpression) -> bool:
    """Return whether an expression is named as the legacy module: ``mpu``, ``self.mpu``, ``cfg.parallel_state``."""
    if not isinstance(node, (cst.Name, cst.Attribute)):
        return False
    name = (get_full_name_for_node(node) or "").rpartition(".")[2]
    return any(name.strip("_") == usual or name.endswith(f"_{usual}") for usual in USUAL_NAMES)


def exports_of(module: cst.Module, path: Path) -> Exports:
    """Return what a module binds at its outermost level."""
    visitor = _ExportsVisitor(module, key_of(path), is_package=path.stem == "__init__")
    module.visit(visitor)
    return visitor.exports


class Names:
    """The modules of a code base, by every name that they may be imported by.

    Args:
        files: the files.
        roots: the paths that they were found under.
    """

    def __init__(self, files: Sequence[Path], roots: Sequence[str | os.PathLike[str]]) -> None:
        self._paths: dict[str, list[Path]] = {}
        self._apis: dict[Path, Api] = {}
        self._exports: dict[Path, Exports] = {}
        modules = {module: api for api in APIS for module in api.modules}
        for path in files:
            for name in {key_of(path), *module_names(path, roots)}:
                self._paths.setdefault(name, []).append(path)
                if name in modules:
                    self._apis[path] = modules[name]

    def __contains__(self, dotted: str) -> bool:
        """Whether a module is one of the code base, or something in one."""
        parts = dotted.split(".")
        return any(".".join(parts[:n]) in self._paths for n in range(1, len(parts) + 1))

    def has_package(self, dotted: str) -> bool:
        """Return whether the first two parts of a name, such as ``megatron.core``, are a module of the code base."""
        return ".".join(dotted.split(".")[:2]) in self._paths

    def add(self, path: Path, exports: Exports) -> None:
        """Remember what a module that was parsed for another reason binds."""
        self._exports[path] = exports

    def meanings(self, dotted: str, seen: frozenset[tuple[Path, str]] = frozenset()) -> set[Legacy | None]:
        """Return what a dotted name stands for: the legacy names, and None if it is or may be anything else."""
        direct = self._direct(dotted)
        if direct is not None:
            return direct
        parts = dotted.split(".")
        for n in range(len(parts), 0, -1):
            paths = self._paths.get(".".join(parts[:n]))
            if paths:
                found = [self._inside(path, parts[n:], seen) for path in paths]
                return set().union(*found, [None] if len(paths) > 1 else [])
        return {None}

    def _direct(self, dotted: str) -> set[Legacy | None] | None:
        """Return what a name is by the import path of an API, or by a folder of that name; None if it is neither."""
        for api in APIS:
            for module in (*api.modules, *api.packages):
                before, found, name = f".{dotted}.".partition(f".{module}.")
                if found and (not before or before.startswith("./")):
                    name = name.removesuffix(".")
                    if module in api.modules or name in api.table or not name:
                        return {Legacy(self._spoken(api), name)}
        return None

    def _inside(self, path: Path, rest: list[str], seen: frozenset[tuple[Path, str]]) -> set[Legacy | None]:
        if path in self._apis:
            return {Legacy(self._spoken(self._apis[path]), ".".join(rest))}
        if not rest or (path, rest[0]) in seen:
            return {None}
        seen |= {(path, rest[0])}
        exports = self.exports(path)
        targets = exports.names.get(rest[0])
        if targets is None:
            found = [self.meanings(".".join([star, *rest]), seen) - {None} for star in exports.stars]
            return set().union(*found) or {None}
        return set().union(
            *(self.meanings(".".join([target, *rest[1:]]), seen) if target else {None} for target in targets)
        )

    def exports(self, path: Path) -> Exports:
        """Return what a module binds; nothing if it cannot be parsed."""
        if path not in self._exports:
            try:
                code = read(path).code
                check_syntax(code)
                self._exports[path] = exports_of(cst.parse_module(code), path)
            except (UnreadableError, cst.ParserSyntaxError, RecursionError):
                self._exports[path] = Exports()
        return self._exports[path]

    def definition(self, api: Api, name: str) -> Signature | None:
        """Return the parameters of a legacy function where the code base defines it itself, once."""
        paths = [
            path
            for path, own in self._apis.items()
            if self._spoken(own) is api and name in self.exports(path).functions
        ]
        return Signature.read(self.exports(paths[0]).functions[name]) if len(paths) == 1 else None

    def defines(self, api: Api) -> bool:
        """Return whether the code base has an API's own modules."""
        return any(self._spoken(own) is api for own in self._apis.values())

    @cached_property
    def _mpu_of_megatron(self) -> bool:
        """Whether the ``megatron.mpu`` of the code base is Megatron's own, before there was a core."""
        paths = [path for path, api in self._apis.items() if api is GPT_NEOX_MPU]
        return any(paths) and not any(_NOT_NEOX in self.exports(path).functions for path in paths)

    def _spoken(self, api: Api) -> Api:
        return MEGATRON if api is GPT_NEOX_MPU and self._mpu_of_megatron else api
