"""Tensor parallelism: strict plans over torch's parallel styles, and fast column and row styles."""

from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)

from namedmesh.tensor_parallel.apply import parallelize
from namedmesh.tensor_parallel.report import PlanReport, plan_report
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "PlanReport",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize",
    "plan_report",
]
