"""Install a compatibility layer: the mechanism behind ``install()``.

If the upstream library can be imported, installed or vendored, the functions that create its groups
are replaced by functions that run them on the groups of a mesh. If it cannot, our fallback can be
imported under its name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from namedmesh.launch.tested_releases import warn_if_untested

UPSTREAM = {
    "megatron": "megatron.core.parallel_state",
    "deepspeed": "deepspeed.runtime.pipe.topology",
    "fairscale": "fairscale.nn.model_parallel.initialize",
    "ezpz": "ezpz.tp",
}
"""The compatibility layers that can be installed, with the upstream module of each."""


class Patch:
    """A reversible patch of an upstream module, or its fallback if upstream is not installed.

    Args:
        upstream: the upstream module with the variables, such as ``"megatron.core.parallel_state"``.
        fallbacks: the name of our module for each name of an upstream module.

    Attributes:
        installed: whether :meth:`install` was called.
    """

    def __init__(self, upstream: str, fallbacks: Mapping[str, str]) -> None:
        self.upstream = upstream
        self.fallbacks = fallbacks
        self.installed: bool = False
        self._undo = ExitStack()

    def replace(self, module: ModuleType) -> Mapping[str, object]:
        """Return the replacements of the functions of upstream's module, by name."""
        raise NotImplementedError

    def restore(self) -> None:
        """Undo :meth:`replace`, before upstream has its own functions again."""

    def install(self, module: str | None = None) -> None:
        """Let upstream use the groups of our meshes. Call it first, and bind meshes afterwards.

        If upstream can be imported, installed or vendored, the functions that create its groups are
        replaced, also in modules that have imported them already. If it cannot, our fallback can be
        imported under its names. A second call does nothing.

        It warns once about releases that are not tested, which use the same mechanism.

        Args:
            module: the name of another module with upstream's functions, such as the ``mpu`` of a
                program; by default upstream's own.
        """
        if self.installed:
            return
        name = module or self.upstream
        if is_installed(name):
            imported = import_module(name)
            warn_if_untested(name)
            self._replace_everywhere(imported, self.replace(imported))
        else:
            # The packages around the names may import our modules, so all of these come first.
            for upstream_name, our_name in self.fallbacks.items():
                self._set(sys.modules, upstream_name, import_module(our_name))
            for upstream_name in self.fallbacks:
                self._add_to_package(upstream_name)
        self._undo.callback(self.restore)
        self.installed = True

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        self.installed = False
        self._undo.close()

    def _set(self, namespace: dict[str, Any], name: str, value: object) -> None:
        """Set a name in a namespace; :meth:`uninstall` restores the previous value."""
        if name in namespace:
            self._undo.callback(namespace.__setitem__, name, namespace[name])
        else:
            self._undo.callback(namespace.pop, name, None)
        namespace[name] = value

    def _replace_everywhere(self, module: ModuleType, replacements: Mapping[str, object]) -> None:
        """Replace functions in the upstream module, and in every module that has imported them."""
        # Functions are found by identity: code may have imported them under any name.
        replacement_of = {id(getattr(module, name)): new for name, new in replacements.items()}
        for holder in list(sys.modules.values()):
            namespace = getattr(holder, "__dict__", {})
            for name, value in list(namespace.items()):
                if id(value) in replacement_of:
                    self._set(namespace, name, replacement_of[id(value)])

    def _add_to_package(self, name: str) -> None:
        """Make a module an attribute of its package; create an empty package if it is missing."""
        package, _, child = name.rpartition(".")
        # A top-level module has no package.
        if not package:
            return
        if is_installed(package):
            import_module(package)
        else:
            empty = ModuleType(package, f"Replaces {package}, which is not installed.")
            # Code that asks whether the package is installed looks at its specification.
            empty.__spec__ = ModuleSpec(package, None, is_package=True)
            empty.__path__ = []
            self._set(sys.modules, package, empty)
            self._add_to_package(package)
        self._set(vars(sys.modules[package]), child, sys.modules[name])


def is_installed(name: str) -> bool:
    """Return whether a module can be imported. To find out, its packages are imported.

    Args:
        name: the full name of the module.
    """
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError as error:
        # A package that exists, but fails to import something else, must not look missing.
        is_around = f"{name}.".startswith(f"{error.name}.")
        if not is_around:
            raise
        return False
