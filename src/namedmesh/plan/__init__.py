"""The offline planner: describe a layout in numbers, tables and pictures, without torch or a GPU.

Every function computes and returns frozen dataclasses; text and pictures are made from those. Names are loaded
when they are first used. What needs torch and real ranks lives apart, in :mod:`namedmesh.plan.group_checks`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from namedmesh.plan.comparison import Comparison, Difference, compare
    from namedmesh.plan.core import Plan, RankPlan, make_plan, plan_rank
    from namedmesh.plan.hardware import Hardware, load_hardware
    from namedmesh.plan.html import draw_html
    from namedmesh.plan.job import Job
    from namedmesh.plan.members import Groups, Members
    from namedmesh.plan.memory import Memory, estimate_memory
    from namedmesh.plan.model import Model, read_config
    from namedmesh.plan.nodes import Placement
    from namedmesh.plan.partitions import Partition, best_partitions, explain, list_partitions, nearest_misses
    from namedmesh.plan.spec import Spec, SpecError, UsageError, parse_spec
    from namedmesh.plan.step import Step, estimate_step
    from namedmesh.plan.svg import draw_svg
    from namedmesh.plan.weights import Cut, Piece, cut_weight

__all__ = [
    "Comparison", "Cut", "Difference", "Groups", "Hardware", "Job", "Members", "Memory", "Model",
    "Partition", "Piece", "Placement", "Plan", "RankPlan", "Spec", "SpecError", "Step", "UsageError",
    "best_partitions", "compare", "cut_weight", "draw_html", "draw_svg", "estimate_memory",
    "estimate_step", "explain", "list_partitions", "load_hardware", "make_plan", "nearest_misses",
    "parse_spec", "plan_rank", "read_config",
]  # fmt: skip

_HOMES = {
    "comparison": ("Comparison", "Difference", "compare"),
    "core": ("Plan", "RankPlan", "make_plan", "plan_rank"),
    "hardware": ("Hardware", "load_hardware"),
    "html": ("draw_html",),
    "job": ("Job",),
    "members": ("Groups", "Members"),
    "memory": ("Memory", "estimate_memory"),
    "model": ("Model", "read_config"),
    "nodes": ("Placement",),
    "partitions": ("Partition", "best_partitions", "explain", "list_partitions", "nearest_misses"),
    "spec": ("Spec", "SpecError", "UsageError", "parse_spec"),
    "step": ("Step", "estimate_step"),
    "svg": ("draw_svg",),
    "weights": ("Cut", "Piece", "cut_weight"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
