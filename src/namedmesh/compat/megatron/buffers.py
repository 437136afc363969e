"""Memory that is allocated once and used again: the original's global buffer."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["GlobalMemoryBuffer"]


class GlobalMemoryBuffer:
    """Named buffers that grow to the largest size asked for; whoever shares a name must not use it at once.

    Args:
        device: where the buffers are; by default the current CUDA device, or the CPU where there is none.

    Example:
        >>> buffer = GlobalMemoryBuffer("cpu")
        >>> first = buffer.get_tensor((2, 3), torch.float32, "mpu")
        >>> first.data_ptr() == buffer.get_tensor((6,), torch.float32, "mpu").data_ptr()
        True
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of a shape, uninitialized, on the buffer of this name and type.

        ``mem_alloc_context`` returns a context manager, which is entered around an allocation.
        """
        length = prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < length:
            with (mem_alloc_context or nullcontext)():
                held = torch.empty(length, dtype=dtype, device=self._device, requires_grad=False)
            self.buffer[name, dtype] = held
        return held[:length].view(*tensor_shape)
