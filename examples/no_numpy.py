"""Lets torch move objects between ranks where numpy is not installed; import it before torch.

torch does without numpy nearly everywhere. But importing it warns, and where ranks exchange Python objects
(when a pipeline finds out its shapes, when a checkpoint is planned) it reads the bytes they arrive in through
numpy. With numpy installed, nothing here does anything.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

__all__ = ["manage_without_numpy"]


class _Bytes:
    """As much of a numpy array as reading the bytes of a tensor takes."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def tobytes(self) -> bytes:
        return bytes(self._values)


def manage_without_numpy() -> None:
    """Do what the module says, if numpy is missing."""
    if importlib.util.find_spec("numpy") is not None:
        return
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    def numpy(tensor: torch.Tensor, **_: Any) -> _Bytes:
        if tensor.dtype != torch.uint8:
            raise RuntimeError("this needs numpy: pip install numpy")
        return _Bytes(tensor.tolist())

    setattr(torch.Tensor, "numpy", numpy)  # noqa: B010  a plain assignment would need two type ignores


manage_without_numpy()
