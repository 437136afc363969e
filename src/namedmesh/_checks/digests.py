"""Hashes of values that must be equal on several ranks, bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from namedmesh._sharding import to_local


def digest(value: object) -> int:
    """Return a hash of the contents of a value, never 0.

    The order of dicts does not matter.

    Args:
        value: tensors (of a DTensor, the local tensor), and any objects in dicts, lists, tuples and
            sets. Objects, such as NumPy arrays, are hashed by the state that pickle would write;
            functions and classes by name; iterators and open files by type alone.

    Example:
        >>> first = {"a": [1], "b": torch.ones(2)}
        >>> digest(first) == digest({"b": torch.ones(2), "a": [1]}) != digest({"a": [1]})
        True
    """
    hasher = hashlib.sha256()
    _update_hash(hasher, value)
    return int.from_bytes(hasher.digest()[:8], "little") >> 1 | 1


def _update_hash(hasher: Any, value: Any, enclosing: tuple[int, ...] = ()) -> None:
    """Add a value to a hash.

    Args:
        hasher: the hash of hashlib.
        value: the value.
        enclosing: the ids of the objects that contain the value, from the outermost inwards.
    """
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
        # Sparse and nested tensors consist of several plain ones.
        _update_hash(hasher, _get_pickled_state(value), (*enclosing, id(value)))
    elif isinstance(value, Tensor):
        flat = to_local(value).detach().resolve_conj().resolve_neg().cpu().contiguous()
        hasher.update(repr((flat.dtype, tuple(flat.shape))).encode())
        hasher.update(ctypes.string_at(flat.data_ptr(), flat.nbytes))
    elif isinstance(value, bytes):  # such as the elements of a NumPy array
        hasher.update(b"\0" + value)
    elif isinstance(value, str | int | float | complex | None):
        hasher.update(b"\0" + repr(value).encode())
    elif isinstance(value, Mapping):
        # Ranks may fill a dict in any order.
        _update_hash(hasher, [(key, value[key]) for key in sorted(value, key=repr)], enclosing)
    elif isinstance(value, list | tuple):
        hasher.update(b"(%d" % len(value))
        for item in value:
            _update_hash(hasher, item, enclosing)
    elif isinstance(value, AbstractSet):
        _update_hash(hasher, sorted(map(digest, value)))
    elif id(value) in enclosing:
        # An object that contains itself is hashed by the distance to its own beginning.
        hasher.update(b"^%d" % enclosing.index(id(value)))
    else:
        _update_hash(hasher, _get_pickled_state(value), (*enclosing, id(value)))


def _get_pickled_state(value: Any) -> object:
    """Return the attributes of an object that pickle would write, without its memory address."""
    if hasattr(value, "__qualname__"):  # a function, a class, or a generator
        return getattr(value, "__module__", None), value.__qualname__
    kind = type(value).__qualname__
    if isinstance(value, Iterator):  # to look at its items would consume them
        return kind
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  each type has its own error for "this cannot be pickled"
        return kind
    if isinstance(reduced, str):  # the name of a global, such as a dtype
        return kind, reduced
    # The items of subclasses of list and dict come last, as iterators.
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]
