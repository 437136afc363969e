"""Describe, draw, compare and rank layouts, without torch or a GPU."""

from __future__ import annotations

from namedmesh.errors import UsageError
from namedmesh.plan.describe import Kind, LayoutPlan, make_plan, rank_text
from namedmesh.plan.diff import Comparison, compare
from namedmesh.plan.hardware import Hardware, load_hardware
from namedmesh.plan.memory import Memory, estimate_memory
from namedmesh.plan.model import Axes, Job, Model, read_config
from namedmesh.plan.partitions import Partition, best_partitions, explain, find_partition, list_partitions
from namedmesh.plan.step import estimate_step
from namedmesh.plan.svg import draw_svg

__all__ = [
    "Axes", "Comparison", "Hardware", "Job", "Kind", "LayoutPlan", "Memory", "Model", "Partition", "UsageError",
    "best_partitions", "compare", "draw_svg", "estimate_memory", "estimate_step", "explain", "find_partition",
    "list_partitions", "load_hardware", "make_plan", "rank_text", "read_config",
]  # fmt: skip
