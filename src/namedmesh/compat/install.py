"""Putting a dialect under the import path of the original, and taking it away again.

Code that says ``from megatron.core import parallel_state`` then gets the dialect, whether or not the original is
installed.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Replacement"]

_ABSENT = object()


class Replacement:
    """Modules that stand in for those of another package.

    Args:
        package: the package that the replaced modules are in, such as ``"megatron.core"``.
        modules: what stands in for what: the replaced module's name, and ours.
        without: further ones, for machines on which the package is not installed.
    """

    def __init__(
        self, package: str, modules: Mapping[str, str], without: Mapping[str, str] | None = None
    ) -> None:
        self.package = package
        self.modules = dict(modules)
        self.without = dict(without or {})
        self.installed = False
        self._before: dict[str, ModuleType] = {}
        self._attributes: list[tuple[ModuleType, str, object]] = []

    def install(self) -> None:
        """Let imports of the replaced modules find ours; a second call does nothing.

        Warns:
            UserWarning: modules of the package were imported before, and keep what they imported.
        """
        if self.installed:
            return
        self._before = self._loaded()
        late = self._holders()
        stand_ins = {name: import_module(ours) for name, ours in self.modules.items()}
        self.installed = True
        sys.modules.update(stand_ins)
        try:
            present = self._import_package()
        except BaseException:
            self.uninstall()
            raise
        if not present:
            self._make_packages()
            stand_ins = {name: import_module(ours) for name, ours in self.without.items()} | stand_ins
        for name, module in stand_ins.items():
            sys.modules[name] = module
            self._set_on_parent(name, module)
        if late:
            warnings.warn(
                f"{', '.join(late)} {'was' if len(late) == 1 else 'were'} imported before install() and "
                f"{'keeps' if len(late) == 1 else 'keep'} the original of {', '.join(self.modules)}; "
                f"call install() before the first import of {self.package}",
                stacklevel=3,
            )

    def uninstall(self) -> None:
        """Put everything back: what was imported in between is forgotten, so that it is imported anew."""
        if not self.installed:
            return
        for name, module in self._loaded().items():
            if self._before.get(name) is not module:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                holder = sys.modules.get(parent)
                if holder is not None and vars(holder).get(child) is module:
                    delattr(holder, child)
        sys.modules.update(self._before)
        for holder, child, value in reversed(self._attributes):
            if value is not _ABSENT:
                setattr(holder, child, value)
            elif child in vars(holder):
                delattr(holder, child)
        self._attributes.clear()
        self._before = {}
        self.installed = False

    def _loaded(self) -> dict[str, ModuleType]:
        """Return what is imported of the package and of what it is in."""
        top = self.package.partition(".")[0]
        return {
            name: module for name, module in sys.modules.items() if name == top or name.startswith(f"{top}.")
        }

    def _holders(self) -> list[str]:
        """Return the imported modules of the package that hold a replaced module, or something out of it."""
        originals = [self._before[name] for name in self.modules if name in self._before]
        names = {original.__name__ for original in originals}
        return sorted(
            name
            for name, module in self._before.items()
            if name not in self.modules
            and any(
                value in originals if isinstance(value, ModuleType) else _home(value) in names
                for value in list(vars(module).values())
            )
        )

    def _import_package(self) -> bool:
        """Import the package, which finds the stand-ins in its place; whether it is installed.

        Now and not on demand: an import of a stand-in by its full name finds it at once, and then nobody
        imports the packages that it is in.
        """
        try:
            import_module(self.package)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self.package}.".startswith(f"{error.name}."):
                return False
            raise
        return True

    def _make_packages(self) -> None:
        """Make empty packages on the way to the replaced modules."""
        parts = self.package.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules and _exists(name):
                import_module(name)
            if name in sys.modules:
                continue
            package = ModuleType(name, f"Stands in for {name}, which is not installed.")
            package.__path__ = []
            sys.modules[name] = package
            self._set_on_parent(name, package)

    def _set_on_parent(self, name: str, module: ModuleType) -> None:
        parent, _, child = name.rpartition(".")
        holder = sys.modules.get(parent)
        if holder is not None:
            self._attributes.append((holder, child, vars(holder).get(child, _ABSENT)))
            setattr(holder, child, module)


def _exists(name: str) -> bool:
    """Return whether a package can be imported; its parents are, to find out."""
    if name in sys.modules:
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def _home(value: object) -> object:
    return getattr(value, "__module__", None)
