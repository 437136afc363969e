"""What the ranks say where they have different things of what is to be the same: names, how far apart, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.errors import listing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

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


def problems_of(
    model: nn.Module, different: Mapping[tuple[str, str], float], axis: str, size: int
) -> list[str]:
    """Return a sentence for each kind of thing that differs: inputs, outputs' gradients, and parameters' gradients.

    Args:
        model: the model.
        different: how far the ranks are apart, as a part of the size, by the kind of thing and its name.
        axis: the name of the axis.
        size: the number of its ranks.
    """
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
