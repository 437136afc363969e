"""Whether values are the same on several ranks: hashes of all that they hold, and two numbers of a tensor."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_SAMPLE = 1024  # elements of a tensor that are compared
_TOLERANCE = 1e-3  # replicas may differ by what rounding adds up to over a run; different tensors by more


def digest(value: object) -> int:
    """Return a hash of what a value holds, never 0; dicts in any order, and NumPy's numbers and arrays are as torch's.

    Example:
        >>> digest({"a": [1], "b": torch.ones(2)}) == digest({"b": torch.ones(2), "a": [1]}) != digest({"a": [1]})
        True
    """
    found = hashlib.sha256()
    _add(found, value)
    return int.from_bytes(found.digest()[:8], "little") >> 1 | 1


def _add(found: Any, value: Any) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        plain = value.ndim == 0 or value.dtype.hasobject
        value = value.tolist() if plain else torch.from_numpy(value)
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        flat = local.detach().resolve_conj().resolve_neg().cpu().contiguous()
        found.update(repr((flat.dtype, tuple(flat.shape))).encode())
        found.update(ctypes.string_at(flat.data_ptr(), flat.nbytes))
    elif isinstance(value, Mapping):
        _add(found, [(key, value[key]) for key in sorted(value, key=repr)])  # which ranks fill in any order
    elif isinstance(value, list | tuple):
        found.update(b"(%d" % len(value))
        for each in value:
            _add(found, each)
    elif isinstance(value, AbstractSet):
        _add(found, sorted(map(digest, value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _add(found, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif hasattr(value, "__dict__") and repr(value) == object.__repr__(value):  # where it lies in memory
        _add(found, vars(value))
    else:
        found.update(b"\0" + repr(value).encode())


@torch.no_grad()
def numbers_of(tensor: Tensor) -> list[float]:
    """Return two numbers of a tensor's elements on this rank, or some of them, that differ between different tensors."""
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLE)]
    some = torch.view_as_real(some.resolve_conj()).reshape(-1) if some.is_complex() else some
    some = some.double()
    weights = torch.arange(len(some), device=some.device, dtype=torch.float64).cos()
    both = torch.stack([some.norm(), some @ weights])
    found: list[float] = both.nan_to_num(nan=1e300, posinf=2e300, neginf=-2e300).tolist()
    return found


def alike(one: list[float], other: list[float]) -> bool:
    """Return whether two results of :func:`numbers_of` are those of one tensor, but for rounding."""
    limit = _TOLERANCE * max((abs(each) for each in (*one, *other)), default=0.0)
    return all(abs(a - b) <= limit for a, b in zip(one, other, strict=True))
