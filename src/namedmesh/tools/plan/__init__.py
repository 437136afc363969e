"""Describe, draw, compare and rank layouts, without torch or a GPU."""

from namedmesh.tools.plan.describe import make_plan
from namedmesh.tools.plan.diff import compare
from namedmesh.tools.plan.hardware import load_hardware
from namedmesh.tools.plan.model import Job, Model, read_config
from namedmesh.tools.plan.partitions import best_partitions, explain, list_partitions
from namedmesh.tools.plan.svg import draw_svg

__all__ = [
    "Job", "Model", "best_partitions", "compare", "draw_svg", "explain", "list_partitions", "load_hardware",
    "make_plan", "read_config",
]  # fmt: skip
