"""``install()`` of a dialect: the original answers from our meshes, or where it is not installed, ours in its place."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from namedmesh.compat.binding import Binding

__all__ = ["Original", "is_installed"]

_ABSENT = object()


class Original:
    """The original of a dialect, which is installed on this machine or not.

    Args:
        module: its module with the variables, such as ``"megatron.core.parallel_state"``.
        binding: what fills them; None where the original keeps none.
        replace: returns what takes the place of its functions and classes, or is added, by the module and the name. It is given
            the imported module, and raises where that is not one that was compared. None where ours always stands in.
        stand_ins: where it is not installed: the module of ours that is found under each of its names.
    """

    def __init__(
        self,
        module: str,
        binding: Binding | None,
        replace: Callable[[Any], Mapping[tuple[str, str], object]] | None,
        stand_ins: Mapping[str, str],
    ) -> None:
        self.module, self.binding, self.replace, self.stand_ins = module, binding, replace, dict(stand_ins)
        self.installed = False
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Let the original answer from our meshes; a second call does nothing.

        Where it is installed it is imported, its variables are filled, and its functions that make groups are ours, also
        in modules that imported them before. Where it is not, our modules are found under its names.

        Raises:
            ContractRuntimeError: a release that was not compared.
        """
        if self.installed:
            return
        try:
            if self.replace is not None and is_installed(self.module):
                module = import_module(self.module)
                self._take_over(module, self.replace(module))
            else:
                self._stand_in()
        except BaseException:
            self.uninstall()
            raise
        self.installed = True

    def uninstall(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
        self.installed = False

    def _take_over(self, module: ModuleType, replaced: Mapping[tuple[str, str], object]) -> None:
        ours = {}
        for (place, name), value in replaced.items():
            original = import_module(place)
            if hasattr(original, name):
                ours[id(getattr(original, name))] = value
            else:
                self._set(original, name, value)
        for holder in list(sys.modules.values()):
            for known, value in list(getattr(holder, "__dict__", {}).items()):
                if id(value) in ours:
                    self._set(holder, known, ours[id(value)])
        if self.binding is not None:
            self.binding.add_module(module)
            self._undo.append(partial(self.binding.remove_module, module))

    def _stand_in(self) -> None:
        stand_ins = {name: import_module(ours) for name, ours in self.stand_ins.items()}
        before = dict(sys.modules)
        top = self.module.partition(".")[0]
        self._undo.append(lambda: _forget_since(before, top))
        sys.modules.update(stand_ins)  # the packages around them may import them
        for name, module in stand_ins.items():
            parts = name.split(".")
            packages = [".".join(parts[:depth]) for depth in range(1, len(parts))]
            for package in packages:
                self._make_package(package)
            self._set(sys.modules[packages[-1]], parts[-1], module)

    def _make_package(self, name: str) -> None:
        """Make an empty package, unless there is one."""
        if name in sys.modules or is_installed(name):
            import_module(name)
            return
        package = ModuleType(name, f"Stands in for {name}, which is not installed.")
        package.__path__ = []
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            self._set(sys.modules[parent], child, package)

    def _set(self, holder: ModuleType, name: str, value: object) -> None:
        before = vars(holder).get(name, _ABSENT)
        vars(holder)[name] = value
        if before is _ABSENT:
            self._undo.append(lambda: vars(holder).pop(name, None))
        else:
            self._undo.append(lambda: vars(holder).update({name: before}))


def _forget_since(before: Mapping[str, ModuleType], top: str) -> None:
    """Forget the modules of a package that were imported since, and find the former ones again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == top]:
        if name in before:
            sys.modules[name] = before[name]
        else:
            del sys.modules[name]


def is_installed(name: str) -> bool:
    """Return whether a module can be imported; the packages around it are, to find out."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(
            f"{error.name}."
        ):  # not the module or a package around it, but what that imports
            raise
        return False
