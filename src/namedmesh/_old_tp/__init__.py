"""Tensor parallelism: strict plans over torch's parallel styles, and fast column and row styles."""

from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)

from namedmesh.tensor_parallel.apply import parallelize
from namedmesh.tensor_parallel.attention_heads import KeyValueParallel
from namedmesh.tensor_parallel.expert_parallel import ExpertParallel
from namedmesh.tensor_parallel.fused import FusedColwiseParallel
from namedmesh.tensor_parallel.gradient_comparison import compare_gradients
from namedmesh.tensor_parallel.gradient_sums import reduce_gradients
from namedmesh.tensor_parallel.hf import plan_from_hf
from namedmesh.tensor_parallel.local import (
    IdentityExpert,
    KeepWhole,
    LocalParameters,
    ShardedExperts,
    SumOutput,
    SumTailGradient,
)
from namedmesh.tensor_parallel.loss import cross_entropy
from namedmesh.tensor_parallel.presets import llama_plan
from namedmesh.tensor_parallel.report import PlanReport, plan_report
from namedmesh.tensor_parallel.shared_input import SharedInput
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
from namedmesh.tensor_parallel.verification import VerifyReport, verify

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "FusedColwiseParallel",
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
    "llama_plan",
    "parallelize",
    "plan_from_hf",
    "plan_report",
    "reduce_gradients",
    "verify",
]
