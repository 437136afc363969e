"""The original's module of topologies and grids, under its name: what ``install()`` puts in its place."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh.compat.deepspeed.process_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _prime_factors,
)

if TYPE_CHECKING:
    from namedmesh.compat.deepspeed.grid import PipelineParallelGrid

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "_prime_factors",
]


def __getattr__(name: str) -> Any:
    # The grid needs torch, which a topology can do without.
    if name == "PipelineParallelGrid":
        return import_module("namedmesh.compat.deepspeed.grid").PipelineParallelGrid
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
