"""Fingerprints of tensors, by which ranks find out whether they have the same; and what they say where they do not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from namedmesh.errors import listing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

COLUMNS = 6
"""How many numbers a rank sends for each name: the state of the tensor, the fingerprint, and how it rounds."""

ABSENT, PRESENT, PART, NEEDS_NONE = 0.0, 1.0, 2.0, 3.0
"""The states: this rank has none, it has one, a part of a sum over the ranks, or a parameter that needs no gradient."""

SETTLED, FROZEN = 1.0, -1.0
"""What :func:`verdicts` says of a tensor that all ranks have alike, and of a parameter that needs a gradient on none."""

_SHOWN = 8
_SENTENCES = {
    "input": (
        "the input of {names}: the plan says that {ranks} have the same, but they differ, {far}; give every rank the "
        "same batch, the same values of what is whole and the same random numbers (namedmesh.training.streams), or "
        "say with input_layouts how the input is sharded"
    ),
    "output": (
        "the output of {names}: {ranks} have all of it, but their gradients of it differ, {far}: each uses it with its "
        "own part of something; leave a column layer's output sharded, with output_layouts=Shard(-1) (keys and values: "
        "KeyValueParallel()), and use the output of a row layer only where all ranks compute the same"
    ),
    "parameter": (
        "{names}: whole on each of {ranks}, but their gradients differ, {far}: each has a part, and they would train "
        "apart; where the ranks use a module on their own features or tokens add {entries} to the plan, which sums the "
        "parts; where they use their own features of what a linear makes, give it a style: ColwiseParallel(), "
        "KeyValueParallel() for keys and values, SumTailGradient(width) if all use its last width features; what all "
        "ranks use alike stays whole (KeepWhole()), and can differ because of what follows it only"
    ),
}

_CHUNK = 1 << 20
_FREQUENCIES = (1.0, 0.7, 0.3)


def row_of(state: float) -> list[float]:
    """Return the row of what has no numbers to compare."""
    return [state, *[0.0] * (COLUMNS - 1)]


def fingerprint(value: Tensor, dtypes: set[torch.dtype]) -> list[float]:
    """Return the row of a plain tensor, computed in ``dtypes`` and its own: its size, and three weighted sums.

    Example:
        >>> row = fingerprint(torch.tensor([3.0, 4.0]), {torch.float32})
        >>> row[0], row[1]
        (1.0, 5.0)
    """
    value = value.detach()
    kinds = {kind for kind in (*dtypes, value.dtype) if kind.is_floating_point or kind.is_complex}
    eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    if value.is_sparse:
        value = value.coalesce().values()
    if value.is_complex():
        value = torch.view_as_real(value)
    flat = value.flatten()
    sums = torch.zeros(1 + len(_FREQUENCIES), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        place = torch.arange(start, start + part.numel(), dtype=torch.float64, device=flat.device)
        sums += torch.stack([part @ part, *(part @ (place * rate).cos() for rate in _FREQUENCIES)])
    squares, *weighted = sums.tolist()
    return [PRESENT, math.sqrt(squares), *weighted, eps]


def verdicts(rows: Tensor) -> list[float]:
    """Return what the rows of all ranks, ``(ranks, tensors, numbers)``, say about each tensor.

    Two tensors count as different where a number of theirs is apart by more than the square root of what their type
    rounds off: sums in another order come near to none of that. Where all of it is within the rounding of the largest
    tensor, nothing is settled: it may be zero.

    Returns:
        For each tensor 0 where nothing is settled, :data:`SETTLED`, :data:`FROZEN`, or for ranks that have different ones
        the first and how far they are apart, as a part of the size.
    """
    rows = rows.cpu()
    largest = float(rows[:, :, 1].nan_to_num(0.0, 0.0, 0.0).max()) if rows.numel() else 0.0
    return [_verdict(rows[:, i], largest) for i in range(rows.shape[1])]


def _verdict(rows: Tensor, largest: float) -> float:
    has, numbers, eps = rows[:, 0], rows[:, 1:-1], float(rows[:, -1].max())
    if bool((has == PART).all()):
        return SETTLED
    if bool((has == NEEDS_NONE).all()):
        return FROZEN
    size = float(numbers[:, 0].max())
    # Where a gradient is zero but for rounding, the terms that cancel out in it may be much larger than eps says; but a
    # type of 16 bits rounds so coarsely that small gradients would hide behind the largest.
    nothing = min(1000 * eps, 1e-4) * largest
    if not torch.isfinite(rows).all() or size <= nothing:
        return 0.0
    difference = float((numbers.amax(0) - numbers.amin(0)).max()) / size
    if difference > math.sqrt(eps) and difference * size > nothing:
        return SETTLED + difference
    return SETTLED if bool(has.all()) else 0.0


def problems_of(
    model: nn.Module, different: Mapping[tuple[str, str], float], axis: str, size: int
) -> list[str]:
    """Return a sentence for each kind of thing of which ranks are apart, by so much of the size."""
    problems = []
    for kind, sentence in _SENTENCES.items():
        found = {name: apart for (each, name), apart in different.items() if each == kind}
        if not found:
            continue
        words = {
            "names": listing((name or "the model" for name in found), _SHOWN),
            "far": f"by up to {max(found.values()):.2g} of the size",
            "ranks": f"the {size} ranks of {axis}",
        }
        if kind == "parameter":
            words["entries"] = listing(_entries(model, list(found)), _SHOWN)
        problems.append(sentence.format(**words))
    return problems


def _entries(model: nn.Module, names: list[str]) -> list[str]:
    """Return the entries of a plan that sum the gradients of some parameters, one for each module."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owner, _, own_name = name.rpartition(".")
        owners.setdefault(owner, []).append(own_name)
    entries = []
    for owner, own_names in owners.items():
        every = [name for name, _ in model.get_submodule(owner).named_parameters(recurse=False)]
        placements = ""
        if len(every) != len(own_names):
            placements = "{" + ", ".join(f"{name!r}: Replicate()" for name in own_names) + "}"
        entries.append(f"{owner!r}: LocalParameters({placements})")
    return entries
