"""Tensor parallelism: strict plans over torch's parallel styles, and column and row styles on local tensors."""

from torch.distributed.tensor.parallel import SequenceParallel

from namedmesh.tensor_parallel.experts import ExpertParallel, ShardedExperts
from namedmesh.tensor_parallel.gradients import compare_gradients, reduce_gradients
from namedmesh.tensor_parallel.hf import plan_from_hf
from namedmesh.tensor_parallel.loss import cross_entropy, entropy, logsumexp, token_log_probs
from namedmesh.tensor_parallel.modules import KeepWhole, LocalParameters, SumOutput
from namedmesh.tensor_parallel.plan import parallelize, plan_report
from namedmesh.tensor_parallel.styles import (
    ColwiseParallel,
    KeyValueParallel,
    RowwiseParallel,
    SharedInput,
    split_linear,
)
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
    "entropy",
    "logsumexp",
    "parallelize",
    "plan_from_hf",
    "plan_report",
    "reduce_gradients",
    "split_linear",
    "token_log_probs",
    "verify",
]
