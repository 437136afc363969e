"""Every comparison of values between ranks.

The ranks compare before the step of an optimizer, or in ``clip_grad_norm_``, on steps 1, 2, 4 and so
on up to 1024. In a forward or backward, layers only keep references to tensors. A check never
changes a number, and nothing that it computes is seen by autograd or by a dispatch mode.

This room imports meshes and how tensors are sharded; tensor parallelism and training import it.
"""

from namedmesh._checks.digests import digest
from namedmesh._checks.fingerprints import LENIENT, Entry, find_differences, fingerprint
from namedmesh._checks.models import (
    KeptTensors,
    ModelCheck,
    compare_before_step,
    list_checks,
)
from namedmesh._checks.replicas import compare_replicas, compare_weights, format_params
from namedmesh._checks.replication import make_layout_key

__all__ = [
    "LENIENT",
    "Entry",
    "KeptTensors",
    "ModelCheck",
    "compare_before_step",
    "compare_replicas",
    "compare_weights",
    "digest",
    "find_differences",
    "fingerprint",
    "format_params",
    "list_checks",
    "make_layout_key",
]
