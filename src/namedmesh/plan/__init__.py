"""Describe, draw, compare and rank layouts, without torch or a GPU."""

from namedmesh.plan.describe import make_plan
from namedmesh.plan.diff import compare
from namedmesh.plan.hardware import load_hardware
from namedmesh.plan.model import Job, Model, read_config
from namedmesh.plan.partitions import best_partitions, explain, list_partitions
from namedmesh.plan.svg import draw_svg

__all__ = [
    "Job", "Model", "best_partitions", "compare", "draw_svg", "explain", "list_partitions", "load_hardware",
    "make_plan", "read_config",
]  # fmt: skip
