"""Tensor parallelism: strict plans of parallel styles, with a fast path on local tensors."""

from torch.distributed.tensor.parallel import SequenceParallel

from namedmesh.tensor_parallel.base_styles import Style
from namedmesh.tensor_parallel.experts import ExpertParallel, ExpertTensorParallel
from namedmesh.tensor_parallel.fused import split_linear
from namedmesh.tensor_parallel.gradients import reduce_gradients, register_gradient_check
from namedmesh.tensor_parallel.hf import plan_from_hf
from namedmesh.tensor_parallel.loss import cross_entropy, entropy, logsumexp, token_log_probs
from namedmesh.tensor_parallel.modules import (
    AllReduceOutput,
    AllReduceOutputGradient,
    LocalParameters,
    NoParallel,
)
from namedmesh.tensor_parallel.plan import parallelize, plan_report
from namedmesh.tensor_parallel.sampling import argmax, sample
from namedmesh.tensor_parallel.styles import (
    ColwiseParallel,
    KeyValueParallel,
    RowwiseParallel,
    SharedInput,
)
from namedmesh.tensor_parallel.verification import VerifyReport, verify

__all__ = [
    "AllReduceOutput",
    "AllReduceOutputGradient",
    "ColwiseParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "KeyValueParallel",
    "LocalParameters",
    "NoParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "SharedInput",
    "Style",
    "VerifyReport",
    "argmax",
    "cross_entropy",
    "entropy",
    "logsumexp",
    "parallelize",
    "plan_from_hf",
    "plan_report",
    "reduce_gradients",
    "register_gradient_check",
    "sample",
    "split_linear",
    "token_log_probs",
    "verify",
]
