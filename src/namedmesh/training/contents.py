"""Values that are not one tensor: a hash of all that they hold, and whether a checkpoint can hold them."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import io
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch

from namedmesh.errors import CheckpointError
from namedmesh.tensor_parallel.collectives import local_shard

if TYPE_CHECKING:
    from collections.abc import Iterator


def digest(value: object) -> int:
    """Return a hash of what a value holds, equal for others with a chance of 2 to the -62; never 0.

    Values that are equal have the same: dicts in any order, and NumPy's numbers and arrays as well as torch's.

    Example:
        >>> digest({"a": [1], "b": torch.ones(2)}) == digest({"b": torch.ones(2), "a": [1]}) != digest({"a": [1]})
        True
    """
    found = hashlib.sha256()
    for part in _parts(value, ()):
        found.update(part)
    return int.from_bytes(found.digest()[:8], "little") >> 1 | 1


def _parts(value: Any, around: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the bytes of a value; ``around`` are the identities of what it is in."""
    if id(value) in around:
        yield b"around"
        return
    inside = (*around, id(value))
    if isinstance(value, torch.Tensor):
        flat = local_shard(value).detach().cpu().contiguous()
        yield repr((flat.dtype, tuple(flat.shape))).encode()
        yield ctypes.string_at(flat.data_ptr(), flat.nbytes)
    elif isinstance(value, Mapping):
        yield b"{"
        # Ranks may fill theirs in different orders.
        for key, each in sorted(value.items(), key=lambda item: repr(item[0])):
            yield from _parts(key, inside)
            yield from _parts(each, inside)
        yield b"}"
    elif isinstance(value, list | tuple):
        yield b"("
        for each in value:
            yield from _parts(each, inside)
        yield b")"
    elif isinstance(value, AbstractSet):
        yield repr(sorted(map(digest, value))).encode()
    else:
        yield from _parts_of_object(value, inside)


def _parts_of_object(value: Any, inside: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the bytes of what is no collection of Python's: NumPy's, or by its fields, or by its text."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        if value.ndim == 0 or value.dtype.hasobject:
            yield from _parts(value.tolist(), inside)
        else:
            yield repr((value.dtype.str, value.shape)).encode()
            yield value.tobytes()
        return
    yield type(value).__name__.encode()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        yield from _parts(fields, inside)
    elif getattr(type(value), "__repr__", None) is object.__repr__ and hasattr(value, "__dict__"):
        yield from _parts(vars(value), inside)
    else:
        yield b"\0" + repr(value).encode()


def plain(value: object, what: str) -> Any:
    """Return a copy of a value as a checkpoint gives it back; refuse what only code could read back."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        return torch.load(written, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  of many kinds, by what torch finds
        cause = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{what} is not plain data ({cause}); give numbers, texts, tensors, and lists, tuples and dicts of them"
        ) from None
