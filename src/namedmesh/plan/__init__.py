"""The offline planner: what a layout amounts to, in numbers, tables and pictures, without torch or a GPU.

Every function computes and returns frozen dataclasses; text and pictures are made from those. Names are loaded
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from namedmesh.plan.core import Groups, Plan, make_plan
    from namedmesh.plan.members import Members
    from namedmesh.plan.nodes import Placement
    from namedmesh.plan.one_rank import RankPlan, plan_rank
    from namedmesh.plan.spec import Spec, SpecError, UsageError, parse_spec

__all__ = [
    "Groups",
    "Members",
    "Placement",
    "Plan",
    "RankPlan",
    "Spec",
    "SpecError",
    "UsageError",
    "make_plan",
    "parse_spec",
    "plan_rank",
]

_HOMES = {
    "core": ("Groups", "Plan", "make_plan"),
    "members": ("Members",),
    "nodes": ("Placement",),
    "one_rank": ("RankPlan", "plan_rank"),
    "spec": ("Spec", "SpecError", "UsageError", "parse_spec"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
