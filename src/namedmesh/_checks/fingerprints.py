"""Fingerprints of tensors, and the comparison of them between ranks.

Replicated tensors may differ by rounding. A fingerprint is therefore made of numbers, which are
compared up to a tolerance. It describes each block of a tensor separately: a difference in a few
rows of a large parameter is small compared with the norm of the parameter, but not with the norm of
its block.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh._errors import GradientError, print_in_one_line
from namedmesh._sharding import to_local
from namedmesh._torch.groups import all_gather_object
from namedmesh._torch.tensors import wait_if_async

# The ranks compare before the steps 1, 2, 4 and so on up to this one.
LAST_STEP = 1024
# A tensor has this many blocks, within limits for their length. Longer blocks would need weights
# that take much memory.
_BLOCKS = 64
_SHORTEST_BLOCK = 16
_LONGEST_BLOCK = 1 << 16
# Tensors in half precision are converted in chunks of this many elements, to bound the memory.
_CHUNK = 1 << 22
# Small tensors are compared in batches of this many elements.
_BATCH = 1 << 18
# Takes the place of values that are not finite: on every rank the same, and far from all others.
_NOT_FINITE = 1e30


Differences: TypeAlias = "dict[tuple[str, str], float]"
"""By kind and name of the entries that differ: the relative difference."""
Problem: TypeAlias = "tuple[int, str]"
"""A priority and a message. Only the problems of the lowest priority are raised."""


class Tolerance(NamedTuple):
    """How far equal values may differ between ranks.

    Attributes:
        relative: the difference of a block, relative to its norm.
        noise: the difference of a block, relative to the largest norm of all tensors of the kind. A
            smaller tensor may be the sum of terms that cancel out, and consist of their rounding.
    """

    relative: float
    noise: float


# Replicated gradients are usually equal bit by bit: the ranks run the same kernels on the same
# values. The exceptions are kernels whose order of summation varies, such as atomic additions on a
# GPU. Their error is some rounding errors of the dtype in which they compute.
_TOLERANCES = {torch.float64: Tolerance(1e-9, 1e-12), torch.float32: Tolerance(1e-5, 1e-6)}
_HALF_PRECISION = Tolerance(1e-2, 1e-3)
# For weights and activations. An optimizer may turn the rounding error of a gradient into a step of
# any size, so replicas drift over many steps. The comparison finds values that were never equal.
LENIENT = Tolerance(1e-2, 1e-6)


def find_tolerance(*dtypes: torch.dtype) -> Tolerance:
    """Return the tolerance for gradients: the largest of several dtypes.

    Autocast and FSDP2's mixed precision compute gradients in half precision, whatever dtype the
    gradients have.

    Args:
        *dtypes: the dtype of the gradients, and the dtypes in which layers have computed.
    """
    tolerances = []
    for dtype in dtypes:
        # Fingerprints of integers are computed in float64.
        is_integer = not dtype.is_floating_point and not dtype.is_complex
        real = torch.float64 if is_integer else dtype.to_real()
        tolerances.append(_TOLERANCES.get(real, _HALF_PRECISION))
    return max(tolerances)


def is_due(step: int) -> bool:
    """Return whether the ranks compare before a step: before 1, 2, 4 and so on up to 1024.

    Args:
        step: the number of the step, from 1.
    """
    return step <= LAST_STEP and step & (step - 1) == 0


class Entry(NamedTuple):
    """A tensor that must be equal on all ranks of a group that have it.

    Attributes:
        kind: the kind of tensor, such as ``"gradients"``.
        name: the name of the tensor; with the kind, it is the same on every rank.
        tensor: the local tensor, or a DTensor, whose local tensor is used; None counts as zeros.
        numel: the number of elements of the local tensor.
        tolerance: how far the values may differ.
    """

    kind: str
    name: str
    tensor: Tensor | None
    numel: int
    tolerance: Tolerance


def is_comparable(tensor: Tensor | None) -> bool:
    """Return whether a tensor has plain values: it is not fake, quantized, sparse or on meta.

    Args:
        tensor: a local tensor, a DTensor, or None.
    """
    if tensor is None:
        return True
    local = wait_if_async(to_local(tensor))
    is_plain = type(local) in {Tensor, torch.nn.Parameter} and local.layout is torch.strided
    return is_plain and not local.is_meta and not local.is_quantized


_Key: TypeAlias = "tuple[str, str, int, Tolerance]"
"""The kind, name, number of blocks and tolerance of an entry."""


class Comparison(NamedTuple):
    """A comparison of entries between the ranks of a group.

    Attributes:
        entries: the entries of this rank. It may lack some, and may have several with one name.
        group: the ranks.
        device: the device on which the group communicates.
        describe: returns the problems, each with a priority, from the differences by kind and name.
            Only the problems of the lowest priority are raised: different inputs explain different
            gradients.
    """

    entries: Sequence[Entry]
    group: dist.ProcessGroup
    device: torch.device
    describe: Callable[[Differences], list[Problem]]


def find_differences(entries: Sequence[Entry], group: dist.ProcessGroup, device: torch.device) -> Differences:
    """Compare entries between the ranks of a group.

    A rank may lack some of the entries, and may have several with one name.

    Collective: every rank of the group must call it. Two small collectives, whose size does not
    depend on the number of ranks.

    Args:
        entries: the entries of this rank.
        group: the ranks.
        device: the device on which the group communicates.

    Returns:
        The same on every rank. By kind and name of the entries that differ: the largest difference
            of a block relative to its norm.
    """
    comparison = Comparison(entries, group, device, lambda _: [])
    (keys,) = _agree_on_keys([comparison])
    return _read_differences(keys, _compute_differences(comparison, keys))


def raise_differences(
    comparisons: Sequence[Comparison], groups: Sequence[dist.ProcessGroup], problems: Iterable[Problem]
) -> None:
    """Compare entries between ranks, and raise the differences on every rank.

    The host reads two values, whatever the number of comparisons, if there is no problem.

    Collective: every rank of the groups must call it, with the same comparisons in the same order.

    Args:
        comparisons: the comparisons, at least one.
        groups: further groups. Their ranks raise together with the ranks of the comparisons.
        problems: the problems that this rank has found already.

    Raises:
        GradientError: on every rank, with the problems of all ranks.
    """
    united = set(problems)
    device = comparisons[0].device
    largest = torch.full((1,), float(bool(united)), dtype=torch.float64, device=device)
    keys_of_comparisons = _agree_on_keys(comparisons)
    differences = []
    all_groups = []
    for comparison, keys in zip(comparisons, keys_of_comparisons, strict=True):
        all_groups.append(comparison.group)
        differences.append(_compute_differences(comparison, keys))
        largest = torch.cat([largest, differences[-1].to(largest)]).amax(0, keepdim=True)
    # By ranks, as several meshes may have the same group.
    unique = {frozenset(dist.get_process_group_ranks(group)): group for group in (*all_groups, *groups)}
    for group in unique.values():
        all_reduce_max(largest, group)
    if largest.tolist() == [0.0]:
        return
    for comparison, keys, difference in zip(comparisons, keys_of_comparisons, differences, strict=True):
        united.update(comparison.describe(_read_differences(keys, difference)))
    for group in unique.values():
        united.update(*all_gather_object(group, united))
    first = min(priority for priority, _ in united)
    error = GradientError(*sorted(message for priority, message in united if priority == first))
    printing_rank = min(frozenset.union(*unique))
    if dist.get_rank() != printing_rank:
        print_in_one_line(error, dist.get_rank(), printing_rank=printing_rank)
    raise error


def all_reduce_max(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replace the values of a tensor by the largest over the ranks of a group.

    Collective: every rank of the group must call it.

    Args:
        tensor: the tensor, on the device on which the group communicates.
        group: the ranks.
    """
    if group.size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)


def _agree_on_keys(comparisons: Sequence[Comparison]) -> list[list[_Key]]:
    """Return for each comparison the keys of the entries of all ranks."""
    keys_of_comparisons: list[list[_Key]] = []
    hashes = []
    for entries, group, device, _ in comparisons:
        keys: dict[_Key, None] = {}
        for entry in entries:
            length = _find_block_length(entry.numel)
            keys[entry.kind, entry.name, -(-entry.numel // length), entry.tolerance] = None
        keys_of_comparisons.append(list(keys))
        # Usually all ranks have the same entries, and need not send their names.
        key_hash = zlib.crc32(repr(keys).encode())
        hashes.append(torch.tensor([key_hash, -key_hash], dtype=torch.float64, device=device))
        all_reduce_max(hashes[-1], group)
    for index, (highest, negative_lowest) in enumerate(torch.stack(hashes).tolist()):
        if highest != -negative_lowest:
            united: set[_Key] = set()
            united.update(*all_gather_object(comparisons[index].group, keys_of_comparisons[index]))
            keys_of_comparisons[index] = sorted(united)
    return keys_of_comparisons


def _compute_differences(comparison: Comparison, keys: Sequence[_Key]) -> Tensor:
    """Return for each key the largest relative difference of a block; 0 within the tolerance."""
    entries, group, device, _ = comparison
    if not keys:
        return torch.zeros(0, device=device)
    blocks: dict[tuple[str, str], range] = {}
    entry_of_block: list[int] = []
    for index, (kind, name, count, _) in enumerate(keys):
        blocks[kind, name] = range(len(entry_of_block), len(entry_of_block) + count)
        entry_of_block += [index] * count
    # The highest norms and sums, and the lowest ones with another sign. Minus infinity leaves an
    # entry that this rank lacks to the other ranks.
    shape = (2, len(entry_of_block), 2)
    extremes = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
    for batch in _make_batches(entries):
        positions: list[int] = []
        for entry in batch:
            positions += blocks[entry.kind, entry.name]
        values = fingerprint([entry.tensor for entry in batch], batch[0].numel)
        values = values.flatten(0, 1).to(device, torch.float64)
        rows = torch.tensor(positions, device=device).view(1, -1, 1).expand(2, -1, 2)
        extremes.scatter_reduce_(1, rows, torch.stack([values, -values]), "amax")
    all_reduce_max(extremes, group)
    return _find_far_blocks(extremes[0], -extremes[1], keys, torch.tensor(entry_of_block, device=device))


def _read_differences(keys: Sequence[_Key], differences: Tensor) -> Differences:
    """Return the differences that are not zero, by kind and name."""
    values = zip(keys, differences.tolist(), strict=True)
    return {(kind, name): difference for (kind, name, _, _), difference in values if difference}


def _make_batches(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the entries in batches of the same size, dtype and device.

    One operator takes a whole batch. A model has many small parameters of a few sizes.
    """
    open_batches: dict[object, list[Entry]] = {}
    batches = []
    for entry in entries:
        tensor = entry.tensor
        key = entry.numel, None if tensor is None else (tensor.dtype, tensor.device)
        batch = open_batches.get(key)
        if batch is None or len(batch) * entry.numel > _BATCH:
            batch = open_batches[key] = []
            batches.append(batch)
        batch.append(entry)
    return batches


def _find_far_blocks(high: Tensor, low: Tensor, keys: Sequence[_Key], entry_of_block: Tensor) -> Tensor:
    """Return for each entry the largest relative difference of a block beyond the tolerance.

    Args:
        high: the highest norm and weighted sum of each block over the ranks, ``(blocks, 2)``.
        low: the lowest ones.
        keys: the key of each entry.
        entry_of_block: the position of the entry of each block.
    """
    norms = high[:, 0]
    distances = (high - low).amax(1)
    zeros = norms.new_zeros(len(keys))
    entry_norms = zeros.index_add(0, entry_of_block, norms.square()).sqrt()
    kinds = list(dict.fromkeys(kind for kind, *_ in keys))
    kind_of_entry = torch.tensor([kinds.index(kind) for kind, *_ in keys], device=norms.device)
    largest = zeros.scatter_reduce(0, kind_of_entry, entry_norms, "amax")[kind_of_entry]
    tolerances = torch.tensor([key[-1] for key in keys], dtype=torch.float64, device=norms.device)
    relative, noise = tolerances.unbind(1)
    # A block may be much smaller than the others of its tensor, and consist of their rounding.
    least = torch.maximum(0.01 * relative * entry_norms, noise * largest)
    is_near = (distances <= relative[entry_of_block] * norms) | (distances <= least[entry_of_block])
    far = (distances / norms).masked_fill(is_near, 0.0)
    return zeros.scatter_reduce(0, entry_of_block, far, "amax")


def fingerprint(tensors: Sequence[Tensor | None], numel: int) -> Tensor:
    """Return the norm and a weighted sum of each block of local tensors.

    Equal tensors have equal fingerprints on all ranks. They are computed in float32, or in float64
    for float64 and integers.

    Args:
        tensors: tensors of one dtype and device, or DTensors, whose local tensors are used. If the
            first is None, all are, and count as zeros.
        numel: the number of elements of each tensor.

    Returns:
        A tensor with the shape (tensors, blocks, 2), without values that are not finite.
    """
    length = _find_block_length(numel)
    rows = []
    for tensor in tensors:
        if tensor is None or numel == 0:
            return torch.zeros(len(tensors), -(-numel // length), 2, device="cpu")
        flat = wait_if_async(to_local(tensor)).detach().resolve_conj()
        rows.append((torch.view_as_real(flat) if flat.is_complex() else flat).reshape(1, -1))
    matrix = rows[0] if len(rows) == 1 else torch.cat(rows)
    length *= matrix.shape[1] // numel  # a complex number is two numbers
    is_single = matrix.is_floating_point() and matrix.dtype != torch.float64
    dtype = torch.float32 if is_single else torch.float64
    weights = _make_weights(dtype, matrix.device)
    numbers = []
    for chunk in matrix.split(max(1, _CHUNK // length) * length, 1):
        whole = chunk.shape[1] // length * length
        for blocks in (chunk[:, :whole].unflatten(1, (-1, length)), chunk[:, whole:].unsqueeze(1)):
            if blocks.numel():
                values = blocks.to(dtype)
                norms = torch.linalg.vector_norm(values, dim=2)
                numbers.append(torch.stack([norms, values @ weights[: values.shape[2]]], 2))
    return torch.cat(numbers, 1).nan_to_num(_NOT_FINITE, _NOT_FINITE, _NOT_FINITE)


def _find_block_length(numel: int) -> int:
    """Return the number of elements of a block of a tensor with ``numel`` elements."""
    return min(max(_SHORTEST_BLOCK, -(-numel // _BLOCKS)), _LONGEST_BLOCK)


@cache
def _make_weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights of the weighted sum of a block."""
    positions = torch.arange(2 * _LONGEST_BLOCK, dtype=torch.float64, device=device)
    return (0.7 * positions).cos().to(dtype)
