"""What a plan comes down to: one module, and the style that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class Entry:
    """One module of the model and the style that the plan gives it.

    Args:
        fqn: the module's fully qualified name; empty for the model itself.
        module: the module.
        style: what will be applied to it.
        key: the key of the plan that names it.
    """

    fqn: str
    module: nn.Module
    style: ParallelStyle
    key: str
