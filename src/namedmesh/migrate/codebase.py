"""The modules of a code base, and what dotted names stand for in them: something of a legacy API, or something else."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.migrate.apis import APIS, GPT_NEOX_MPU, MEGATRON, Api
from namedmesh.migrate.files import UnreadableError, key_of, module_names, python_files, read
from namedmesh.migrate.findings import Problem
from namedmesh.migrate.module import USUAL_NAMES, Module, read_module
from namedmesh.migrate.rules import Signature

if TYPE_CHECKING:
    import ast
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_SPACED = re.sub(rb"\W", b" ", bytes(range(256)))  # what bytes.translate takes to leave words only
_COMMON = {"logger", "is_initialized", "create_group"}  # names that do not suggest a legacy API by themselves
_LEGACY_WORDS = frozenset((*USUAL_NAMES, *(name for api in APIS for name in api.table))) - _COMMON
_IMPORT = re.compile(rb"^\s*(?:from|import)\s+(megatron(?:\.\w+)?)\b", re.MULTILINE)
_NOT_NEOX = "get_pipe_parallel_group"


class Legacy(NamedTuple):
    """A name of a legacy API; the empty name is the module itself."""

    api: Api
    name: str

    @property
    def is_known(self) -> bool:
        """Whether the table has the name, or it is the module itself."""
        return not self.name or self.name in self.api.table


class CodeBase:
    """The modules of a code base, by every name that they may be imported by."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.files = list(python_files(paths))
        self.problems: dict[Path, Problem] = {}
        self._modules: dict[Path, Module | None] = {}  # None if it cannot be read, and need not be
        self._paths: dict[str, list[Path]] = {}
        self._apis: dict[Path, Api] = {}
        self._meanings: dict[frozenset[str | None], set[Legacy | None]] = {}
        # By way of star imports, for the name that is asked for
        self._searched: set[tuple[Path, str]] = set()
        modules = {module: api for api in APIS for module in api.modules}
        for path in self.files:
            for name in {key_of(path), *module_names(path, paths)}:
                self._paths.setdefault(name, []).append(path)
                if name in modules:
                    self._apis[path] = modules[name]
        self._words = frozenset[str]()
        self._read()

    # Its files.

    @property
    def modules(self) -> list[Module]:
        """The modules that were read."""
        return [module for module in self._modules.values() if module]

    @cached_property
    def packages(self) -> frozenset[str]:
        """The first two parts, such as ``megatron.core``, of the names that start with ``megatron``."""
        return frozenset(name for name in self._paths if re.fullmatch(r"megatron(\.\w+)?", name))

    def _read(self) -> None:
        """Read the files that may have uses: those with a legacy name, or with one that the code base gives to it."""
        new = _LEGACY_WORDS
        while new:
            self._words |= new
            wanted = {word.encode() for word in new}
            for path in self.files:
                if path not in self.problems:
                    self._read_one(path, wanted)
            aliases = [(name, one.names[name]) for one in self.modules for name in one.aliases]
            new = frozenset(name for name, dotted in aliases if self.meanings(dotted) - {None}) - self._words

    def _read_one(self, path: Path, wanted: set[bytes]) -> None:
        """Read one file, if it has one of the wanted words or imports of Megatron what is not here."""
        try:
            source = read(path)
            has_one = not wanted.isdisjoint(source.code.translate(_SPACED).split())
            if not has_one and path not in self._modules:
                has_one = any(name.decode() not in self.packages for name in _IMPORT.findall(source.code))
            if has_one:
                self._modules[path] = read_module(source, path, self._words)
        except UnreadableError as error:
            self.problems[path] = Problem(str(path), str(error))

    def _module(self, path: Path) -> Module | None:
        """Return a module that others import from; None if it cannot be read."""
        if path not in self._modules:
            try:
                self._modules[path] = read_module(read(path), path, self._words)
            except UnreadableError:
                self._modules[path] = None
        return self._modules[path]

    # What names stand for.

    def __contains__(self, dotted: str) -> bool:
        """Whether a module is one of the code base, or something in one."""
        parts = dotted.split(".")
        return any(".".join(parts[:n]) in self._paths for n in range(1, len(parts) + 1))

    def meanings(self, names: frozenset[str | None]) -> set[Legacy | None]:
        """Return the legacy names that some dotted names stand for, and None if one is or may be anything else."""
        if names not in self._meanings:
            self._searched.clear()
            try:
                self._meanings[names] = self._union(names, frozenset())
            except RecursionError:  # a name that goes from module to module
                self._meanings[names] = {None}
        return self._meanings[names]

    def _union(self, names: Iterable[str | None], seen: frozenset[tuple[Path, str]]) -> set[Legacy | None]:
        """Return the meanings of several names; the modules that were looked into on the way, and the names, are seen."""
        found: set[Legacy | None] = set()
        by_star: list[set[Legacy | None]] = []
        for name in names:
            if name is None:
                found.add(None)
            elif name.startswith("*"):
                by_star.append(self._meanings_of(name[1:], seen))
            else:
                found |= self._meanings_of(name, seen)
        known = [one for one in by_star if any(legacy and legacy.is_known for legacy in one)]
        if by_star and not known:
            found.add(None)
        return found.union(*known)

    def _meanings_of(self, dotted: str, seen: frozenset[tuple[Path, str]]) -> set[Legacy | None]:
        direct = self._direct(dotted)
        if direct is not None:
            return {direct}
        parts = dotted.split(".")
        for n in range(len(parts), 0, -1):
            paths = self._paths.get(".".join(parts[:n]))
            if paths:
                found = [self._inside(path, parts[n:], seen) for path in paths]
                return set().union(*found, [None] if len(paths) > 1 else [])
        return {None}

    def _direct(self, dotted: str) -> Legacy | None:
        """Return what a name is by the import path of an API, or by a folder of that name; None if it is neither."""
        for api in APIS:
            for module in (*api.modules, *api.packages):
                before, found, name = f".{dotted}.".partition(f".{module}.")
                if found and (not before or before.startswith("./")):
                    name = name.removesuffix(".")
                    if module in api.modules or name in api.table or not name:
                        return Legacy(self._spoken(api), name)
        return None

    def _inside(self, path: Path, rest: list[str], seen: frozenset[tuple[Path, str]]) -> set[Legacy | None]:
        if path in self._apis:
            return {Legacy(self._spoken(self._apis[path]), ".".join(rest))}
        module = self._module(path) if rest and (path, rest[0]) not in seen else None
        if module is None:
            return {None}
        targets = module.names.get(rest[0])
        if targets is None:
            if (path, rest[0]) in self._searched:  # modules may import everything of each other
                return {None}
            self._searched.add((path, rest[0]))
            targets = frozenset(f"*{star}.{rest[0]}" for star in module.stars)
        after = "".join(f".{part}" for part in rest[1:])
        names = [target + after if target else None for target in targets]
        return self._union(names, seen | {(path, rest[0])}) or {None}

    # The legacy APIs that it has itself.

    def definition(self, api: Api, name: str) -> Signature | None:
        """Return the parameters of a legacy function where the code base defines it itself, once."""
        own = [self._functions(path) for path, spoken in self._apis.items() if self._spoken(spoken) is api]
        found = [functions[name] for functions in own if name in functions]
        return Signature.of(found[0]) if len(found) == 1 else None

    def defines(self, api: Api) -> bool:
        """Return whether the code base has an API's own modules."""
        return any(self._spoken(own) is api for own in self._apis.values())

    def _functions(self, path: Path) -> dict[str, ast.arguments]:
        module = self._module(path)
        return module.functions if module else {}

    @cached_property
    def _mpu_of_megatron(self) -> bool:
        """Whether the ``megatron.mpu`` of the code base is Megatron's own, before there was a core."""
        paths = [path for path, api in self._apis.items() if api is GPT_NEOX_MPU]
        return any(paths) and not any(_NOT_NEOX in self._functions(path) for path in paths)

    def _spoken(self, api: Api) -> Api:
        return MEGATRON if api is GPT_NEOX_MPU and self._mpu_of_megatron else api
