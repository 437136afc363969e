"""The arithmetic of shards."""

from namedmesh.compat.layers import (
    VocabUtility,
    check_even,
    check_shards,
    divide,
    ensure_divisibility,
    scatter,
    split_tensor_along_last_dim,
)

__all__ = ["VocabUtility", "check_even", "check_shards", "divide", "ensure_divisibility", "scatter"]
__all__ += ["split_tensor_along_last_dim"]
