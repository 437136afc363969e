"""Tensor parallelism: strict plans over torch's parallel styles, and column and row styles on plain tensors."""

from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)

from namedmesh.tensor_parallel.apply import parallelize
from namedmesh.tensor_parallel.experts import ExpertParallel, IdentityExpert, ShardedExperts
from namedmesh.tensor_parallel.gradients import compare_gradients, reduce_gradients
from namedmesh.tensor_parallel.heads import KeyValueParallel, split_linear
from namedmesh.tensor_parallel.hf import plan_from_hf
from namedmesh.tensor_parallel.loss import cross_entropy
from namedmesh.tensor_parallel.modules import KeepWhole, LocalParameters, SumOutput, SumTailGradient
from namedmesh.tensor_parallel.report import PlanReport, plan_report
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowwiseParallel, SharedInput
from namedmesh.tensor_parallel.verification import VerifyReport, verify

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "IdentityExpert",
    "KeepWhole",
    "KeyValueParallel",
    "LocalParameters",
    "PlanReport",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardedExperts",
    "SharedInput",
    "SumOutput",
    "SumTailGradient",
    "VerifyReport",
    "compare_gradients",
    "cross_entropy",
    "parallelize",
    "plan_from_hf",
    "plan_report",
    "reduce_gradients",
    "split_linear",
    "verify",
]
