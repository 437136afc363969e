"""Two releases of megatron-core as oracles: the one that is installed, and the newest one.

The newest one has wheels for later Pythons only, and pip does not install two releases side by side. It is unpacked into
a directory, which the environment variable MEGATRON_NEWEST names; its modules are Python, and run here.
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
"""What stands for the newest release in ``pytest.mark.oracle``."""
RELEASES = (
    pytest.param("installed", marks=pytest.mark.oracle("megatron.core")),
    pytest.param("newest", marks=pytest.mark.oracle(NEWEST, "einops")),
)


_imported: dict[str, dict[str, ModuleType]] = {}
# The variables of each parallel state as they are after its import: a test may leave groups in them that are no more.
_at_first: dict[str, dict[str, Any]] = {}


def available() -> bool:
    """Whether the newest release is unpacked here."""
    return (Path(os.environ.get(NEWEST, "/nowhere")) / "megatron" / "core").is_dir()


_LOAD_FROM_BYTES = torch.storage._load_from_bytes


def forget() -> None:
    """Forget the modules of either release, and what the newest one puts in torch's place while it is imported."""
    torch.storage._load_from_bytes = _LOAD_FROM_BYTES
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def put_first(which: str) -> None:
    """Let imports find one of the releases, from now on; what was imported of it is found again."""
    forget()
    path = os.environ.get(NEWEST, "/nowhere")
    sys.path[:] = [each for each in sys.path if each != path]
    if which == "newest":
        sys.path.insert(0, path)
    sys.modules.update(_imported.get(which, {}))


@contextmanager
def without_triton() -> Iterator[None]:
    """Let modules that define kernels for a GPU be imported where there is no compiler for them."""
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
    """One of the releases' parallel state."""
    put_first(which)
    try:
        with without_triton() if which == "newest" else nullcontext():
            module = importlib.import_module("megatron.core.parallel_state")
        # Its destruction looks for experts on a GPU.
        sys.modules["megatron.core.transformer.moe.fused_a2a"] = None  # type: ignore[assignment]
        _imported[which] = {
            name: each for name, each in sys.modules.items() if name.partition(".")[0] == "megatron"
        }
        first = _at_first.setdefault(which, {**vars(module), "_HYBRID_DP_CP_GROUPS": {}})
        vars(module).update({**first, "_HYBRID_DP_CP_GROUPS": {}})
        yield module
    finally:
        megatron.uninstall()
        put_first("installed")
