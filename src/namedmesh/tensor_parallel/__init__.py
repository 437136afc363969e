"""Tensor parallelism: strict plans over torch's parallel styles, and column and row styles on plain tensors."""

from torch.distributed.tensor.parallel import SequenceParallel

from namedmesh.tensor_parallel.apply import parallelize
from namedmesh.tensor_parallel.experts import ExpertParallel, ShardedExperts
from namedmesh.tensor_parallel.gradients import compare_gradients, reduce_gradients
from namedmesh.tensor_parallel.hf import plan_from_hf
from namedmesh.tensor_parallel.loss import cross_entropy
from namedmesh.tensor_parallel.modules import (
    KeepWhole,
    KeyValueParallel,
    LocalParameters,
    SumOutput,
    split_linear,
)
from namedmesh.tensor_parallel.plan import plan_report
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowwiseParallel, SharedInput
from namedmesh.tensor_parallel.verification import VerifyReport, verify

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "KeepWhole",
    "KeyValueParallel",
    "LocalParameters",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardedExperts",
    "SharedInput",
    "SumOutput",
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
