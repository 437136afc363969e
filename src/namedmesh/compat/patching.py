"""Put a compatibility layer in place of an upstream library: the mechanism behind ``install()``.

If the library is installed, the functions that make its groups are replaced, and its own accessors answer
from our meshes. If it is not, our module can be imported under the library's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

UPSTREAM = {
    "megatron": "megatron.core.parallel_state",
    "deepspeed": "deepspeed.runtime.pipe.topology",
    "fairscale": "fairscale.nn.model_parallel.initialize",
    "ezpz": "",
}
"""The compatibility layers that can be installed, and the upstream module that each of them patches.

ezpz is not published with this interface, so our module always stands in for it.
"""


@dataclass
class Patch:
    """A reversible replacement of an upstream module, which may or may not be installed on this machine.

    Args:
        module: the upstream module with the variables, such as ``"megatron.core.parallel_state"``.
        replace: takes the imported module and returns the replacements of its functions and classes, by
            name. None if our module always stands in.
        stand_ins: our module for each upstream name, for use if upstream is not installed.
        restore: called by :meth:`uninstall` before everything else.
    """

    module: str
    replace: Callable[[ModuleType], Mapping[str, object]] | None
    stand_ins: Mapping[str, str]
    restore: Callable[[], None] = lambda: None
    installed: bool = field(default=False, init=False)
    _undo: ExitStack = field(default_factory=ExitStack, init=False)

    def install(self) -> None:
        """Let upstream answer from our meshes. Call it before anything else, and bind meshes afterwards.

        If upstream is installed, it is imported, and the functions that make its groups are replaced, also
        in modules that have imported them before. If it is not, our modules are found under its names.
        A second call does nothing.
        """
        if self.installed:
            return
        if self.replace is not None and is_installed(self.module):
            module = import_module(self.module)
            self._replace_everywhere(module, self.replace(module))
        else:
            for name, our_name in self.stand_ins.items():
                self.set(sys.modules, name, import_module(our_name))
            # Only now: the packages around the names may import them.
            for name in self.stand_ins:
                self._add_to_package(name)
        self._undo.callback(self.restore)
        self.installed = True

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        self.installed = False
        self._undo.close()

    def set(self, namespace: dict[str, Any], name: str, value: object) -> None:
        """Set a name in a namespace until :meth:`uninstall` restores the value of before."""
        if name in namespace:
            self._undo.callback(namespace.__setitem__, name, namespace[name])
        else:
            self._undo.callback(namespace.pop, name, None)
        namespace[name] = value

    def _replace_everywhere(self, module: ModuleType, replacements: Mapping[str, object]) -> None:
        """Replace functions in the upstream module and in every module that holds them under some name."""
        replacement_of: dict[int, object] = {}
        for name, replacement in replacements.items():
            replacement_of[id(getattr(module, name))] = replacement
        for holder in list(sys.modules.values()):
            namespace = getattr(holder, "__dict__", {})
            for name, value in list(namespace.items()):
                if id(value) in replacement_of:
                    self.set(namespace, name, replacement_of[id(value)])

    def _add_to_package(self, name: str) -> None:
        """Make a module an attribute of its package; a missing package is replaced by an empty one."""
        package, _, child = name.rpartition(".")
        if not package:
            return
        if is_installed(package):
            import_module(package)
        else:
            empty = ModuleType(package, f"Stands in for {package}, which is not installed.")
            empty.__path__ = []
            self.set(sys.modules, package, empty)
            self._add_to_package(package)
        self.set(vars(sys.modules[package]), child, sys.modules[name])


def is_installed(name: str) -> bool:
    """Return whether a module can be imported. The packages around it are imported to find out."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError as error:
        is_around = f"{name}.".startswith(f"{error.name}.")
        if not is_around:  # a package around it is there, and fails to import something else
            raise
        return False


def reload_fresh(module: ModuleType) -> ModuleType:
    """Return another copy of a module, as it is right after its import, whatever was assigned in it since."""
    spec: Any = spec_from_file_location(module.__name__, module.__file__)
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh
