"""``install()`` of a dialect: the original answers from our meshes, or where it is not installed, ours in its place."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from namedmesh.compat.errors import ContractRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from namedmesh.compat.binding import Binding

__all__ = ["Original"]

_ABSENT = object()


class Original:
    """The original of a dialect, which is installed on this machine or not.

    Args:
        module: its module with the variables, such as ``"megatron.core.parallel_state"``.
        binding: what fills them; None where the original keeps none.
        replace: returns what takes the place of its functions and classes, by the module and the name. It is given
            the imported module, and raises where that is not one that was compared.
        stand_ins: where it is not installed: the module of ours that is found under each of its names.
    """

    def __init__(
        self,
        module: str,
        binding: Binding | None,
        replace: Callable[[Any], Mapping[tuple[str, str], object]],
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
            if _is_installed(self.module):
                self._take_over(import_module(self.module))
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

    def _take_over(self, module: ModuleType) -> None:
        for (place, name), ours in self.replace(module).items():
            original = getattr(import_module(place), name)
            for holder in list(sys.modules.values()):
                for known, value in list(getattr(holder, "__dict__", {}).items()):
                    if value is original:
                        self._set(holder, known, ours)
        if self.binding is not None:
            self.binding.add_module(module)
            self._undo.append(lambda binding=self.binding: binding.remove_module(module))  # type: ignore[misc]

    def _stand_in(self) -> None:
        for name, ours in self.stand_ins.items():
            parts = name.split(".")
            for depth in range(1, len(parts)):
                self._make_package(".".join(parts[:depth]))
            self._put(name, import_module(ours))

    def _make_package(self, name: str) -> None:
        """Make an empty package, unless there is one."""
        if name in sys.modules or _is_installed(name):
            import_module(name)
            return
        package = ModuleType(name, f"Stands in for {name}, which is not installed.")
        package.__path__ = []
        self._put(name, package)

    def _put(self, name: str, module: ModuleType) -> None:
        """Let an import of a name find a module."""
        before = sys.modules.get(name)
        sys.modules[name] = module
        self._undo.append(
            lambda: sys.modules.pop(name) if before is None else sys.modules.update({name: before})
        )
        parent, _, child = name.rpartition(".")
        if parent:
            self._set(sys.modules[parent], child, module)

    def _set(self, holder: ModuleType, name: str, value: object) -> None:
        before = vars(holder).get(name, _ABSENT)
        vars(holder)[name] = value
        if before is _ABSENT:
            self._undo.append(lambda: vars(holder).pop(name, None))
        else:
            self._undo.append(lambda: vars(holder).update({name: before}))


def refuse_release(package: str, found: str, compared: str) -> ContractRuntimeError:
    """Return the error for a release of an original that was not compared with."""
    return ContractRuntimeError(
        f"{package} {found} is imported, and namedmesh was compared with {compared} only; install one of those, or "
        f"import the dialect as namedmesh.compat... without install()"
    )


def _is_installed(name: str) -> bool:
    """Return whether a module can be imported; the packages around it are, to find out."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False
