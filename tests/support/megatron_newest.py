"""Two releases of megatron-core to compare with: the installed one, and the newest one.

The newest release has wheels for later Pythons only, and pip cannot install two releases. It is unpacked into the directory
that the environment variable MEGATRON_NEWEST names. Its modules are pure Python, so they run here.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch

from namedmesh.compat import megatron

if TYPE_CHECKING:
    from collections.abc import Iterator

NEWEST = "MEGATRON_NEWEST"
"""The name of the newest release in ``pytest.mark.oracle``."""
RELEASES = (
    pytest.param("installed", marks=pytest.mark.oracle("megatron.core")),
    pytest.param("newest", marks=pytest.mark.oracle(NEWEST, "einops")),
)


_imported: dict[str, dict[str, ModuleType]] = {}
# The variables of each parallel state after its import, because a test may leave destroyed groups in them.
_at_first: dict[str, dict[str, Any]] = {}


def available() -> bool:
    """Whether the newest release is unpacked on this machine."""
    return (Path(os.environ.get(NEWEST, "/nowhere")) / "megatron" / "core").is_dir()


_LOAD_FROM_BYTES = torch.storage._load_from_bytes


def forget() -> None:
    """Forget the modules of both releases, and undo the newest one's replacement of a function of torch."""
    torch.storage._load_from_bytes = _LOAD_FROM_BYTES
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def put_first(which: str) -> None:
    """Let imports find one of the releases; modules that were imported from it before are reused."""
    forget()
    path = os.environ.get(NEWEST, "/nowhere")
    sys.path[:] = [entry for entry in sys.path if entry != path]
    if which == "newest":
        sys.path.insert(0, path)
    sys.modules.update(_imported.get(which, {}))


@contextmanager
def without_triton() -> Iterator[None]:
    """Context manager in which modules with Triton kernels can be imported without Triton."""
    names = ("triton", "triton.language") if find_spec("triton") is None else ()
    for name in names:
        module = ModuleType(name)
        vars(module).update(__version__="3.4.0", __getattr__=lambda _: MagicMock())
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@contextmanager
def release(which: str) -> Iterator[Any]:
    """Context manager that imports one release and returns its parallel state."""
    put_first(which)
    try:
        with without_triton() if which == "newest" else nullcontext():
            module = importlib.import_module("megatron.core.parallel_state")
        # Upstream's destruction imports this module, which needs a GPU.
        sys.modules["megatron.core.transformer.moe.fused_a2a"] = None  # type: ignore[assignment]
        _imported[which] = {
            name: imported for name, imported in sys.modules.items() if name.partition(".")[0] == "megatron"
        }
        first = _at_first.setdefault(which, {**vars(module), "_HYBRID_DP_CP_GROUPS": {}})
        vars(module).update({**first, "_HYBRID_DP_CP_GROUPS": {}})
        yield module
    finally:
        megatron.uninstall()
        put_first("installed")
