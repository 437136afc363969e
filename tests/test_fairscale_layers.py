"""fairscale's layers, mappings and loss do what the original's do, rank by rank."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from legacy_layers import differences, facts, results, shard, started
from ranks import run_ranks
from torch import Tensor, nn
from tp_compare import apart, gradient_of, numbers

from namedmesh.compat import fairscale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V, H, OUT = 16, 12, 24


def original(part: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"fairscale.nn.model_parallel.{part}")


@pytest.fixture(scope="module")
def _imported() -> None:
    """Import the original before the ranks are forked, once."""
    original("layers")


@contextmanager
def both() -> Iterator[tuple[Any, Any]]:
    """The original's layers, and ours."""
    start = original("initialize")
    start.initialize_model_parallel(dist.get_world_size())
    with started("fairscale"):
        yield original("layers"), fairscale.layers
    start.destroy_model_parallel()


INIT: Callable[[Tensor], Tensor] = nn.init.normal_
KEPT = {"keep_master_weight_for_test": True}
KINDS = {
    "column": ("ColumnParallelLinear", (H, OUT)),
    "row": ("RowParallelLinear", (H, OUT)),
    "vocabulary": ("VocabParallelEmbedding", (V, H)),
    "features": ("ParallelEmbedding", (V, H)),
}
# The arguments of a layer, and what it is given.
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "column": (KEPT, "whole"),
    "column, no gather": ({"gather_output": False}, "whole"),
    "column, no bias": ({"bias": False}, "whole"),
    "column, stride": ({"stride": 3, **KEPT}, "whole"),
    "row": (KEPT, "whole"),
    "row, parallel input": ({"input_is_parallel": True}, "shard"),
    "row, no bias": ({"bias": False}, "whole"),
    "row, stride": ({"stride": 3, **KEPT}, "whole"),
    "vocabulary": ({}, "ids"),
    "vocabulary, padding": ({"padding_idx": 0}, "ids of the first"),
    "vocabulary, norm": ({"max_norm": 1.5, "norm_type": 3.0}, "ids"),
    "vocabulary, frequency": ({"scale_grad_by_freq": True}, "ids, no first"),
    "vocabulary, sparse": ({"sparse": True}, "ids"),
    "features": ({}, "ids"),
    "features, padding": ({"padding_idx": 3}, "ids"),
    "features, frequency": ({"scale_grad_by_freq": True}, "ids"),
    "features, sparse": ({"sparse": True}, "ids"),
}


def given(kind: str) -> Tensor:
    if kind in {"whole", "shard"}:
        return shard(numbers(5, 3, H, seed=1), -1 if kind == "shard" else None)
    ids = torch.randint(0, V, (4, 6), generator=torch.Generator().manual_seed(2))
    part = V // dist.get_world_size()
    if kind == "ids of the first":  # the original takes the padding id for one of each rank's part
        return ids % part
    if kind == "ids, no first":  # it counts the others' ids as the first of its part
        return torch.where(ids % part == 0, ids + 1, ids)
    return ids


def compare_layers() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with both() as modules:
        for name, (arguments, value) in LAYERS.items():
            kind, sizes = KINDS[name.partition(",")[0]]
            layers = []
            for module in modules:
                torch.manual_seed(7)
                layers.append(getattr(module, kind)(*sizes, init_method=INIT, **arguments))
            theirs, ours = layers
            found[name] = {
                "attributes": {
                    key
                    for key in vars(theirs).keys() - {"training", "master_weight"}
                    if not key.startswith("_") and getattr(ours, key) != getattr(theirs, key)
                },
                "gathered": 0.0,
            }
            if hasattr(theirs, "get_master_weight"):
                found[name]["gathered"] = apart(theirs.get_master_weight(), ours.get_master_weight())
            found[name] |= facts(theirs, ours, given(value))
        drawn = [_drawn_weights(module) for module in modules]
        assert drawn[0] == drawn[1]
    return found


def _drawn_weights(module: Any) -> list[Any]:
    """What the function that fills a shard leaves in it, and returns."""
    drawn = []
    for dim, stride, keep in ((0, 1, True), (1, 1, False), (0, 3, True), (1, 3, True)):
        shape = [OUT, H]
        shape[dim] //= dist.get_world_size()
        weight = torch.zeros(shape)
        torch.manual_seed(5)
        whole = module._initialize_affine_weight(weight, OUT, H, shape[dim], dim, INIT, stride, keep)
        drawn.append([weight.tolist(), None if whole is None else whole.tolist()])
    return drawn


@pytest.mark.oracle("fairscale")
@pytest.mark.usefixtures("_imported")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_are_the_originals(world_size: int) -> None:
    for found in run_ranks(world_size, compare_layers):
        assert list(found) == list(LAYERS)
        for name, told in found.items():
            assert told.pop("apart") < 1e-12, name
            kept = told.pop("master"), told.pop("state")
            # On one rank the original keeps the parameter itself, and registers it a second time.
            assert kept == (0, True) or world_size == 1, name
            embedding = name.startswith(("vocabulary", "features"))
            expected = {
                # The original takes another argument for the type of the norm.
                "attributes": {"norm_type"} if name.startswith("features") else set(),
                "gathered": 0,
                "weights": True,
                "names": True,
                "gradients": 1 if embedding else 2 if "no bias" in name else 3,  # input, weight, bias
            }
            assert told == expected, name


def compare_copies() -> list[float]:
    """Frozen weights, copies, and a state that goes from one to the other."""
    with both() as modules:
        theirs, ours = (module.ColumnParallelLinear(H, OUT) for module in modules)
        ours.load_state_dict(theirs.state_dict())
        found = []
        for layer in (theirs, ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):  # noqa: S301  our own
            layer.weight.requires_grad_(False)
            found.append(results(layer, given("whole"), [layer.bias]))
    return [apart(*pair) for others in found[1:] for pair in zip(found[0], others, strict=True)]


@pytest.mark.oracle("fairscale")
@pytest.mark.usefixtures("_imported")
def test_layers_can_be_frozen_copied_and_pickled() -> None:
    for found in run_ranks(2, compare_copies):
        assert len(found) == 9
        assert max(found) < 1e-12


def where_they_differ() -> dict[str, list[bool]]:
    """For options of the embeddings: whether each has the gradient, or the output, of one whole embedding."""
    ids = torch.arange(V).repeat(2)
    found = {}
    with both() as modules:
        for name, kind, dim, options in (
            ("padding", "VocabParallelEmbedding", 0, {"padding_idx": 0}),
            ("frequency", "VocabParallelEmbedding", 0, {"scale_grad_by_freq": True}),
            ("norm", "ParallelEmbedding", 1, {"max_norm": 1.0}),
        ):
            whole = nn.Embedding(V, H, **options)
            layers = [getattr(module, kind)(V, H, **options) for module in modules]
            with torch.no_grad():
                whole.weight.copy_(numbers(V, H, seed=5))
                for layer in layers:
                    layer.weight.copy_(shard(whole.weight, dim))
            outputs = [layer(ids) for layer in (whole, *layers)]
            for output in outputs:
                output.sum().backward()
            gradient = shard(gradient_of(whole.weight), dim)
            found[name] = [
                max(apart(layer.weight.grad, gradient), apart(output, outputs[0])) < 1e-12
                for layer, output in zip(layers, outputs[1:], strict=True)
            ]
    return found


@pytest.mark.oracle("fairscale")
@pytest.mark.usefixtures("_imported")
def test_embeddings_are_whole_ones_where_the_originals_are_not() -> None:
    """It freezes a vector of each rank's part, counts ids that are elsewhere, and takes a norm of shards."""
    first, second = run_ranks(2, where_they_differ)
    assert first == {"padding": [True, True], "frequency": [False, True], "norm": [False, True]}
    assert second == {"padding": [False, True], "frequency": [False, True], "norm": [False, True]}


def compare_mappings() -> dict[str, float]:
    found = {}
    with both():
        for name in fairscale.mappings.__all__:
            value = numbers(3, 2, 8, seed=1 if name.startswith(("copy", "scatter")) else dist.get_rank())
            functions = [getattr(module, name) for module in (original("mappings"), fairscale.mappings)]
            found[name] = max(differences(functions, value))
        parts = numbers(3, 2, 8, seed=dist.get_rank()) * 3
        target = torch.randint(
            0, 8 * dist.get_world_size(), (3, 2), generator=torch.Generator().manual_seed(1)
        )
        losses = [original("cross_entropy"), fairscale.cross_entropy]
        for dtype in (torch.float64, torch.float32):
            calls = [partial(_loss, module.vocab_parallel_cross_entropy, target) for module in losses]
            found[f"{dtype}"] = max(differences(calls, parts.to(dtype)))
        whole = fairscale.gather_from_model_parallel_region(parts)
        expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none")
        kept = parts.clone()
        loss = fairscale.vocab_parallel_cross_entropy(parts, target)
        found["whole"] = apart(loss.flatten(), expected) + apart(parts, kept)
    return found


def _loss(loss: Callable[..., Tensor], target: Tensor, logits: Tensor) -> Tensor:
    return loss(logits, target)


@pytest.mark.oracle("fairscale")
@pytest.mark.usefixtures("_imported")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mappings_and_loss_are_the_originals(world_size: int) -> None:
    for found in run_ranks(world_size, compare_mappings):
        assert len(found) == 7
        for name, distance in found.items():
            assert distance < (1e-5 if name == "torch.float32" else 1e-12), name
