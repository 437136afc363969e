"""What dotted names stand for: something of a legacy API, also by way of the scanned modules, or something else."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.migrate.apis import APIS, GPT_NEOX_MPU, MEGATRON, Api
from namedmesh.migrate.files import key_of, module_names

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from namedmesh.migrate.module import Module
    from namedmesh.migrate.rules import Signature

_NOT_NEOX = "get_pipe_parallel_group"


class Legacy(NamedTuple):
    """A name of a legacy API; the empty name is the module itself."""

    api: Api
    name: str

    @property
    def is_known(self) -> bool:
        """Whether the table has the name, or it is the module itself."""
        return not self.name or self.name in self.api.table


class Names:
    """The modules of a code base, by every name that they may be imported by.

    Args:
        files: the files.
        roots: the paths that they were found under.
        read: reads one of them, if it can be read.
    """

    def __init__(
        self,
        files: Sequence[Path],
        roots: Sequence[str | os.PathLike[str]],
        read: Callable[[Path], Module | None],
    ) -> None:
        self.modules: dict[Path, Module | None] = {}
        self._read = read
        self._searched: set[tuple[Path, str]] = (
            set()
        )  # by way of star imports, for the name that is asked for
        self._paths: dict[str, list[Path]] = {}
        self._apis: dict[Path, Api] = {}
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

    @property
    def packages(self) -> frozenset[str]:
        """The first two parts, such as ``megatron.core``, of the names that start with ``megatron``."""
        return frozenset(name for name in self._paths if re.fullmatch(r"megatron(\.\w+)?", name))

    def meanings(
        self, names: Iterable[str | None], seen: frozenset[tuple[Path, str]] = frozenset()
    ) -> set[Legacy | None]:
        """Return what some dotted names stand for: the legacy names, and None if one is or may be anything else.

        Args:
            names: the dotted names. None is anything else; those with a ``*`` before them count if a table has them.
            seen: the modules that were looked into on the way, and the names.
        """
        if not seen:
            self._searched.clear()
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
        if not rest or (path, rest[0]) in seen:
            return {None}
        seen |= {(path, rest[0])}
        module = self.module(path)
        if module is None:
            return {None}
        targets = module.names.get(rest[0])
        if targets is None:
            if (path, rest[0]) in self._searched:  # modules may import everything of each other
                return {None}
            self._searched.add((path, rest[0]))
            targets = frozenset(f"*{star}.{rest[0]}" for star in module.stars)
        after = "".join(f".{part}" for part in rest[1:])
        return self.meanings([target + after if target else None for target in targets], seen) or {None}

    def module(self, path: Path) -> Module | None:
        """Return one module; None if it cannot be read."""
        if path not in self.modules:
            self.modules[path] = self._read(path)
        return self.modules[path]

    def _functions(self, path: Path) -> dict[str, Signature]:
        module = self.module(path)
        return module.functions if module else {}

    def aliases(self) -> set[str]:
        """Return the names under which the modules that were read hand out legacy ones."""
        return {
            alias
            for module in list(self.modules.values())
            if module
            for alias in module.aliases
            if self.meanings(module.names[alias]) - {None}
        }

    def definition(self, api: Api, name: str) -> Signature | None:
        """Return the parameters of a legacy function where the code base defines it itself, once."""
        own = [self._functions(path) for path, spoken in self._apis.items() if self._spoken(spoken) is api]
        found = [functions[name] for functions in own if name in functions]
        return found[0] if len(found) == 1 else None

    def defines(self, api: Api) -> bool:
        """Return whether the code base has an API's own modules."""
        return any(self._spoken(own) is api for own in self._apis.values())

    @cached_property
    def _mpu_of_megatron(self) -> bool:
        """Whether the ``megatron.mpu`` of the code base is Megatron's own, before there was a core."""
        paths = [path for path, api in self._apis.items() if api is GPT_NEOX_MPU]
        return any(paths) and not any(_NOT_NEOX in self._functions(path) for path in paths)

    def _spoken(self, api: Api) -> Api:
        return MEGATRON if api is GPT_NEOX_MPU and self._mpu_of_megatron else api
