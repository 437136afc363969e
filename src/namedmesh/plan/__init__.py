"""The offline planner: describe a layout in numbers, tables and pictures, without torch or a GPU.

Every function computes and returns frozen dataclasses; text and pictures are made from those. Names are loaded
when they are first used. What needs torch and real ranks lives apart, in :mod:`namedmesh.plan.doctor`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from namedmesh.plan.comparison import Comparison, Difference, compare
    from namedmesh.plan.core import Groups, Plan, RankPlan, make_plan, plan_rank
    from namedmesh.plan.costs import (
        Memory,
        Model,
        estimate_activations,
        estimate_memory,
        estimate_model_memory,
        estimate_step,
        estimate_traffic,
    )
    from namedmesh.plan.html import draw_html
    from namedmesh.plan.members import Members
    from namedmesh.plan.nodes import Placement
    from namedmesh.plan.partitions import Partition, best_partitions, list_partitions
    from namedmesh.plan.shard import Cut, Piece, cut_weight
    from namedmesh.plan.spec import Spec, SpecError, UsageError, parse_spec
    from namedmesh.plan.svg import draw_svg

__all__ = [
    "Comparison",
    "Cut",
    "Difference",
    "Groups",
    "Members",
    "Memory",
    "Model",
    "Partition",
    "Piece",
    "Placement",
    "Plan",
    "RankPlan",
    "Spec",
    "SpecError",
    "UsageError",
    "best_partitions",
    "compare",
    "cut_weight",
    "draw_html",
    "draw_svg",
    "estimate_activations",
    "estimate_memory",
    "estimate_model_memory",
    "estimate_step",
    "estimate_traffic",
    "list_partitions",
    "make_plan",
    "parse_spec",
    "plan_rank",
]

_HOMES = {
    "comparison": ("Comparison", "Difference", "compare"),
    "core": ("Groups", "Plan", "RankPlan", "make_plan", "plan_rank"),
    "costs": (
        "Memory",
        "Model",
        "estimate_activations",
        "estimate_memory",
        "estimate_model_memory",
        "estimate_step",
        "estimate_traffic",
    ),
    "members": ("Members",),
    "nodes": ("Placement",),
    "html": ("draw_html",),
    "partitions": ("Partition", "best_partitions", "list_partitions"),
    "shard": ("Cut", "Piece", "cut_weight"),
    "spec": ("Spec", "SpecError", "UsageError", "parse_spec"),
    "svg": ("draw_svg",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
