"""Layers under a plan are as in one process, and every collective matters: without it, or with it twice, some check sees it.

The call sites are read from the source. For each of them a mutant of the collective takes its place, at that
site only, and the checks that pass through the site run again.
"""

from __future__ import annotations

import ast
import copy
import importlib
import math
import pkgutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from as_cuda import NoReads
from ranks import run_ranks
from threads import run_threads
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from tp_checks import CHECKS, as_whole, largest_difference
from tp_compare import assert_right, sharded, tp_mesh, training_difference
from tp_models import Attention, Llama, attention_plan, llama_plan

import namedmesh.tensor_parallel as package
from namedmesh.sizes import shared_heads
from namedmesh.tensor_parallel import RowwiseParallel, collectives, cross_entropy

WORLD = 2
TOLERANCE = 1e-9


class Site(NamedTuple):
    """Where a collective is called."""

    module: str
    line: int
    collective: str


def alone(x: Any, group: Any, dim: int | None = None) -> Any:
    """What would be, if nobody communicated: the same, joined with itself, or cut."""
    return x if dim is None else torch.cat([x] * group.size, dim)


def cut(x: Any, group: Any, dim: int | None = None) -> Any:
    return x if dim is None else collectives.local_shard(x, group, dim)


LOCAL_OPS: dict[str, Callable[..., Any]] = {
    "_copy": alone,
    "_all_reduce_sum": cut,
    "_reduce_scatter": cut,
    "all_gather": alone,
    "local_shard": cut,
    "_all_to_all": lambda x, *_: x.clone(),
    "_all_to_all_backward": lambda x, *_: x.clone(),
}
REMOVED: dict[str, Callable[..., Any]] = {
    "enter_tp_region": alone,
    "copy_to_tp_region": alone,
    "all_gather_to_tp_region": alone,
    "exit_tp_region": cut,
    "reduce_from_tp_region": cut,
    "reduce_scatter_from_tp_region": cut,
    "gather": alone,
    "split": cut,
    "all_to_all_single": lambda x, *_: x.clone(),
    "_apply_collective": lambda x, op, _backward_op, *rest: LOCAL_OPS[op.__name__](x, *rest),
    "all_reduce": lambda x, *_: x.clone(),
    "all_gather": alone,
}


def sum_twice(x: Any, group: Any, dim: int | None = None) -> Any:
    """Sum over the ranks as if a second all-reduce followed: multiplied by the number of ranks."""
    return collectives.exit_tp_region(WORLD * x, group, dim)


def apply_twice(x: Any, *rest: Any) -> Any:
    # The function itself, because the name in the module is the switch that calls this mutant.
    return collectives._Collective.apply(WORLD * x, *rest)  # type: ignore[no-untyped-call]


DOUBLED: dict[str, Callable[..., Any]] = {
    "exit_tp_region": sum_twice,
    "reduce_from_tp_region": sum_twice,
    "reduce_scatter_from_tp_region": sum_twice,
    "_apply_collective _all_reduce_sum": apply_twice,
    "_apply_collective _reduce_scatter": apply_twice,
}


def without_backward_sum(x: Any, group: Any, dim: int | None = None) -> Any:
    """Enter a tensor-parallel region, but leave the gradient partial."""
    return x if dim is None else collectives.gather(x, group, dim)


UNSUMMED: dict[str, Callable[..., Any]] = {
    "enter_tp_region": without_backward_sum,
    "copy_to_tp_region": without_backward_sum,
    "all_gather_to_tp_region": without_backward_sum,
}
MUTANTS = (("removed", REMOVED), ("doubled", DOUBLED), ("unsummed", UNSUMMED))


def label(name: str, way: str) -> str:
    """The name of a collective; of the one for all, with the way it goes."""
    return f"{name} {way}" if name == "_apply_collective" else name


def modules() -> list[ModuleType]:
    names = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    return [*map(importlib.import_module, names)]


def sites_of(module: ModuleType) -> set[Site]:
    """The calls of collectives in a module."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return {
        Site(
            module.__name__, call.lineno, label(call.func.id, getattr([*call.args, None, None][1], "id", ""))
        )
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in REMOVED
    }


class Switch:
    """Stands in for a collective everywhere, notes who calls it, and at one site lets a mutant answer."""

    def __init__(self, name: str, original: Any, site: Site | None, mutant: Any) -> None:
        self.name, self.original, self.site, self.mutant = name, original, site, mutant
        self.__name__ = name
        self.reached: set[Site] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        name = label(self.name, getattr([*args, None][1], "__name__", ""))
        site = Site(caller.f_globals["__name__"], caller.f_lineno, name)
        self.reached.add(site)
        return (self.mutant if site == self.site else self.original)(*args, **kwargs)


def run_check(
    check: Callable[[], Any], site: Site | None = None, mutant: Any = None
) -> tuple[float, set[Site]]:
    """The largest difference on any rank (infinite where a rank fails), and the sites that were reached."""
    originals = {name: getattr(collectives, name) for name in REMOVED}
    switches = []
    with ExitStack() as stack:
        for module in modules():
            for name, original in originals.items():
                if getattr(module, name, None) is original:
                    switches.append(Switch(name, original, site, mutant))
                    stack.enter_context(mock.patch.object(module, name, switches[-1]))
        try:
            worst = max(run_threads(WORLD, largest_difference, check))
        except AssertionError:
            worst = math.inf
    return worst, set().union(*(switch.reached for switch in switches))


def survivors() -> tuple[set[Site], list[str], int]:
    """The sites that no check reaches, the mutants that no check sees, and how many mutants there were."""
    reached: dict[Site, list[Callable[[], Any]]] = {}
    for name, check in CHECKS.items():
        worst, sites = run_check(check)
        assert worst < TOLERANCE, f"{name}: {worst}"
        for site in sites:
            reached.setdefault(site, []).append(check)
    every = {site for module in modules() for site in sites_of(module)}
    every -= {
        site for site in every if site.collective == "_apply_collective "
    }  # the way back, one site for all
    alive, count = [], 0
    for site in sorted(each for each in reached if each in every or each.module == collectives.__name__):
        for kind, mutants in MUTANTS:
            name = site.collective
            mutant: Any = mutants.get(name) or mutants.get(name.partition(" ")[0])
            if mutant is None:
                continue
            count += 1
            if not any(run_check(check, site, mutant)[0] > 1e-6 for check in reached[site]):
                alive.append(f"{site.module.rpartition('.')[2]}.py:{site.line}: {site.collective} {kind}")
    return every - set(reached), alive, count


def test_a_check_sees_every_collective_that_is_removed_or_doubled() -> None:
    ((missed, alive, count),) = run_ranks(1, survivors, init=False, timeout=280)
    assert missed == set()
    # The backward of an all-reduce does not communicate. Without that of a gather, only the second
    # derivative would differ: test_tp_modes compares it.
    assert [name.rpartition(": ")[2] for name in alive] == [
        "_apply_collective _copy removed",
        "_apply_collective local_shard removed",
    ]
    assert count > 35


def differences() -> dict[str, float]:
    return {name: largest_difference(check) for name, check in CHECKS.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_layout_and_option_is_as_in_one_process(tp_size: int) -> None:
    assert_right(run_ranks(tp_size, differences), TOLERANCE, len(CHECKS))


def stranger() -> str:
    model = sharded(nn.Embedding(16, 8), RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(IndexError) as caught:
        model(torch.tensor([[3, 16]]))
    return str(caught.value)


def test_an_id_outside_the_vocabulary_is_refused_on_every_rank() -> None:
    text = "index out of range in self: the ids run from 3 to 16, the vocabulary from 0 to 15"
    assert run_ranks(2, stranger) == [text] * 2


def stranger_on_an_accelerator() -> list[str]:
    style = RowwiseParallel(input_layouts=Replicate())
    model = sharded(
        nn.Embedding(16, 8), style, check_gradients=False
    )  # the check of the first step reads values
    logits, mesh = torch.zeros(2, 8), tp_mesh()
    with mock.patch.object(Tensor, "is_cpu", new=False), NoReads():
        model(torch.tensor([[3, 15]]))
        cross_entropy(logits, torch.tensor([15, -100]), mesh)
        with pytest.raises(RuntimeError) as of_ids:
            model(torch.tensor([[3, 16]]))
        with pytest.raises(RuntimeError) as of_targets:
            cross_entropy(logits, torch.tensor([-3, 1]), mesh)
    return [str(of_ids.value), str(of_targets.value)]


def test_an_id_outside_the_vocabulary_fails_on_an_accelerator_without_a_synchronization() -> None:
    what = "an id is outside the vocabulary, from 0 to 15"
    texts = [f"index out of range in self: {what}", f"target is out of bounds: {what}"]
    assert run_ranks(2, stranger_on_an_accelerator) == [texts, texts]


# --- grouped attention over any number of ranks that divides the queries ----------------------------------------

COUNTS = [
    (queries, heads, size)
    for size in (2, 3, 4)
    for queries in (size, 2 * size, 3 * size)
    for heads in range(1, queries + 1)
    if queries % heads == 0 and heads % size
]


@pytest.mark.parametrize(("queries", "heads", "size"), [*COUNTS, (32, 4, 8), (64, 8, 16), (48, 6, 8)])
def test_every_query_gets_its_own_head(queries: int, heads: int, size: int) -> None:
    shared = shared_heads(queries, heads, size)
    given = [head for rank in shared for head in rank for _ in range(queries // size // len(rank))]
    assert given == [query // (queries // heads) for query in range(queries)]


def llama_differences() -> list[float]:
    size = torch.distributed.get_world_size()
    found = []
    for queries, heads, of_size in COUNTS:
        if of_size != size or queries == size:
            continue
        make = partial(
            Llama, dim=4 * queries, n_heads=queries, n_kv_heads=heads, vocab=24, hidden=12 * size, layers=1
        )
        for sequence in (False, True):
            plan = llama_plan(queries, heads, sequence_parallel=sequence)
            ids = torch.arange(24).view(2, 12)
            found.append(largest_difference(partial(as_whole, make, plan, ids)))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_llama_with_any_number_of_kv_heads_is_as_in_one_process(size: int) -> None:
    for found in run_ranks(size, llama_differences):
        assert found
        assert max(found) < TOLERANCE, found


def counts_difference() -> float:
    """Plain torch applies the style too, with counts that the caller gives."""
    torch.manual_seed(0)
    reference = Attention(16, 4, 1).double()
    model = parallelize_module(copy.deepcopy(reference), tp_mesh(), attention_plan(4, 1))
    return training_difference(model, reference, torch.randn(2, 5, 16, dtype=torch.float64))


def test_torch_applies_the_style_with_given_counts() -> None:
    assert max(run_ranks(2, counts_difference)) < 1e-12
