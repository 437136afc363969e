"""A dispatch mode that sees the collectives of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from namedmesh._torch.groups import get_group_by_name


class CollectiveMode(TorchDispatchMode):
    """Calls a function for each collective that torch dispatches, after it has run.

    torch's ``CommDebugMode`` counts collectives, but knows neither groups nor sizes.

    Args:
        record: gets the name of the operator, its group, and the bytes that this rank puts into it,
            or gets out of it if they are more.
    """

    def __init__(self, record: Callable[[str, dist.ProcessGroup, int], None]) -> None:
        from torch.distributed.tensor import DTensor

        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.dtensor = DTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.dtensor in types:
            return NotImplemented  # DTensor then calls operators on its local tensors
        result = func(*args, **(kwargs or {}))
        group = _find_group(func, (*args, *(kwargs or {}).values()))
        if group is not None:
            num_bytes = 0
            # Some operators return the output, others write into an argument.
            for value in (*args, result):
                leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                num_bytes = max(num_bytes, sum(leaf.nbytes for leaf in leaves))
            self.record(func.__name__, group, num_bytes)
        return result


def _find_group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the group of an operator, or None if it does not communicate.

    Functional collectives get the name of the group, ``torch.distributed`` passes a boxed group.
    """
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    for parameter, value in zip(schema.arguments if schema else (), args, strict=False):
        if parameter.name == "group_name" and value:
            return get_group_by_name(value)
        if parameter.name == "process_group":
            group: dist.ProcessGroup = dist.ProcessGroup.unbox(value)
            return group
    return None
