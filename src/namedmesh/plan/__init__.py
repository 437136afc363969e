"""The offline planner: describe a layout in numbers and one picture, and rank layouts by what they cost, without torch or a GPU."""

from __future__ import annotations

from namedmesh.plan.cost import Memory, Step, estimate_memory, estimate_step
from namedmesh.plan.hardware import Hardware, load_hardware
from namedmesh.plan.job import Job
from namedmesh.plan.model import Model, read_config
from namedmesh.plan.partitions import Partition, best_partitions, explain, find_partition, list_partitions
