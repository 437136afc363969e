"""Parallelized layers compute the same as in one process, and a check fails without any collective.

The call sites of collectives are read from the source. A mutant then replaces the collective at one
site, and the checks that reach this site run again: at least one of them must fail.
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
from tp_checks import CHECKS, compare_module, run_check
from tp_compare import assert_no_difference, compare_training, make_tp_mesh, parallelize_copy
from tp_models import Attention, Llama, make_attention_plan, make_llama_plan

import namedmesh.tensor_parallel as package
from namedmesh.layout.sizes import find_shared_heads
from namedmesh.tensor_parallel import RowwiseParallel, collectives, cross_entropy

WORLD = 2
TOLERANCE = 1e-9


class Site(NamedTuple):
    """A line that calls a collective."""

    module: str
    line: int
    collective: str


def repeat_local(x: Any, group: Any, dim: int | None = None) -> Any:
    """Return the shape of an all-gather, without communication."""
    return torch.cat([x] * group.size, dim) if isinstance(dim, int) else x


def take_shard(x: Any, group: Any, dim: int | None = None) -> Any:
    """Return the shape of a reduce-scatter, without communication."""
    return collectives.local_shard(x, group, dim) if isinstance(dim, int) else x


LOCAL_OPS: dict[str, Callable[..., Any]] = {
    "_copy": repeat_local,
    "all_reduce": take_shard,
    "_reduce_scatter": take_shard,
    "all_gather": repeat_local,
    "local_shard": take_shard,
    "keep_and_shard": take_shard,
    "_all_to_all": lambda x, *_: x.clone(),
    "_all_to_all_backward": lambda x, *_: x.clone(),
}
REMOVED: dict[str, Callable[..., Any]] = {
    "enter_tp_region": repeat_local,
    "copy_to_tp_region": repeat_local,
    "all_gather_to_tp_region": repeat_local,
    "exit_tp_region": take_shard,
    "reduce_from_tp_region": take_shard,
    "reduce_scatter_from_tp_region": take_shard,
    "gather": repeat_local,
    "split": take_shard,
    "all_to_all_single": lambda x, *_: x.clone(),
    **dict.fromkeys(
        ("_apply_collective", "_apply_differentiably"),
        lambda x, op, _backward_op, *rest: LOCAL_OPS[op.__name__](x, *rest),
    ),
    "all_reduce": lambda x, *_: x.clone(),
    "all_gather": repeat_local,
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
    "_apply_differentiably all_reduce": apply_twice,
    "_apply_differentiably _reduce_scatter": apply_twice,
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


def format_collective(name: str, forward_op: str) -> str:
    """Return the name of a collective; for the generic function, with its forward operation."""
    is_generic = name in {"_apply_collective", "_apply_differentiably"}
    return f"{name} {forward_op}" if is_generic else name


def import_modules() -> list[ModuleType]:
    """Return all modules of tensor_parallel."""
    names = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    return [*map(importlib.import_module, names)]


def find_sites(module: ModuleType) -> set[Site]:
    """Return the calls of collectives in the source of a module."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    sites = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in REMOVED:
            forward_op = getattr(call.args[1], "id", "") if len(call.args) > 1 else ""
            name = format_collective(call.func.id, forward_op)
            sites.add(Site(module.__name__, call.lineno, name))
    return sites


class Switch:
    """Replaces a collective in all modules: records its callers, and calls a mutant at one site.

    Attributes:
        reached: the sites that have called the collective.
    """

    def __init__(self, name: str, original: Any, site: Site | None, mutant: Any) -> None:
        self.__name__ = name
        self.name = name
        self.original = original
        self.site = site
        self.mutant = mutant
        self.reached: set[Site] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        forward_op = getattr(args[1], "__name__", "") if len(args) > 1 else ""
        name = format_collective(self.name, forward_op)
        site = Site(caller.f_globals["__name__"], caller.f_lineno, name)
        self.reached.add(site)
        function = self.mutant if site == self.site else self.original
        return function(*args, **kwargs)


def run_with_mutant(
    check: Callable[[], Any], site: Site | None = None, mutant: Any = None
) -> tuple[float, set[Site]]:
    """Return the largest difference on any rank (infinity if one fails), and the sites reached."""
    originals = {name: getattr(collectives, name) for name in REMOVED}
    switches: list[Switch] = []
    with ExitStack() as stack:
        for module in import_modules():
            for name, original in originals.items():
                if getattr(module, name, None) is original:
                    switch = Switch(name, original, site, mutant)
                    switches.append(switch)
                    stack.enter_context(mock.patch.object(module, name, switch))
        try:
            largest = max(run_threads(WORLD, run_check, check))
        except AssertionError:
            largest = math.inf
    return largest, set().union(*(switch.reached for switch in switches))


def find_survivors() -> tuple[set[Site], list[str], int]:
    """Run all checks with all mutants.

    Returns:
        The sites that no check reaches, the mutants that no check detects, and the number of
        mutants.
    """
    checks_by_site: dict[Site, list[Callable[[], Any]]] = {}
    for name, check in CHECKS.items():
        largest, reached = run_with_mutant(check)
        assert largest < TOLERANCE, f"{name}: {largest}"
        for site in reached:
            checks_by_site.setdefault(site, []).append(check)
    sites = set()
    for module in import_modules():
        # The calls in the generic functions have no operation by name.
        sites |= {
            site for site in find_sites(module) if not site.collective.startswith("_apply_differentiably")
        }
    survivors = []
    count = 0
    for site, checks in sorted(checks_by_site.items()):
        if site not in sites and site.module != collectives.__name__:
            continue
        for kind, mutants in MUTANTS:
            name = site.collective
            mutant: Any = mutants.get(name) or mutants.get(name.partition(" ")[0])
            if mutant is None:
                continue
            count += 1
            if not any(run_with_mutant(check, site, mutant)[0] > 1e-6 for check in checks):
                file = f"{site.module.rpartition('.')[2]}.py"
                survivors.append(f"{file}:{site.line}: {site.collective} {kind}")
    return sites - set(checks_by_site), survivors, count


@pytest.mark.slow
def test_checks_detect_every_removed_or_doubled_collective() -> None:
    ((missed, survivors, count),) = run_ranks(1, find_survivors, init=False, timeout=280)
    assert missed == set()
    # The backward of an all-reduce does not communicate. Without that of a gather, only the second
    # derivative would differ: test_tp_modes compares it.
    assert [name.rpartition(": ")[2] for name in survivors] == [
        "_apply_differentiably _copy removed",
        "_apply_differentiably keep_and_shard removed",
    ]
    assert count > 35


def run_checks() -> dict[str, float]:
    return {name: run_check(check) for name, check in CHECKS.items()}


@pytest.mark.parametrize("tp_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_and_option_equals_one_process(tp_size: int) -> None:
    assert_no_difference(run_ranks(tp_size, run_checks), TOLERANCE, len(CHECKS))


def embed_invalid_id() -> str:
    model = parallelize_copy(nn.Embedding(16, 8), RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(IndexError) as caught:
        model(torch.tensor([[3, 16]]))
    return str(caught.value)


def test_an_id_outside_the_vocabulary_raises_on_every_rank() -> None:
    text = "index out of range in self: the ids run from 3 to 16, the vocabulary from 0 to 15"
    assert run_ranks(2, embed_invalid_id) == [text] * 2


def use_invalid_ids_on_accelerator() -> list[str]:
    style = RowwiseParallel(input_layouts=Replicate())
    # Without the comparison of gradients, which reads values.
    model = parallelize_copy(nn.Embedding(16, 8), style, check_gradients=False)
    logits, mesh = torch.zeros(2, 8), make_tp_mesh()
    with mock.patch.object(Tensor, "is_cpu", new=False), NoReads():
        model(torch.tensor([[3, 15]]))
        cross_entropy(logits, torch.tensor([15, -100]), mesh)
        with pytest.raises(RuntimeError) as ids_error:
            model(torch.tensor([[3, 16]]))
        with pytest.raises(RuntimeError) as targets_error:
            cross_entropy(logits, torch.tensor([-3, 1]), mesh)
    return [str(ids_error.value), str(targets_error.value)]


def test_an_id_outside_the_vocabulary_fails_on_an_accelerator_without_a_synchronization() -> None:
    reason = "an id is outside the vocabulary, from 0 to 15"
    messages = [f"index out of range in self: {reason}", f"target is out of bounds: {reason}"]
    assert run_ranks(2, use_invalid_ids_on_accelerator) == [messages, messages]


# --- grouped attention over any number of ranks that divides the queries -------------------------

HEAD_COUNTS = [
    (queries, heads, size)
    for size in (2, 3, 4)
    for queries in (size, 2 * size, 3 * size)
    for heads in range(1, queries + 1)
    if queries % heads == 0 and heads % size
]


@pytest.mark.parametrize(("queries", "heads", "size"), [*HEAD_COUNTS, (32, 4, 8), (64, 8, 16), (48, 6, 8)])
def test_every_query_attends_to_its_own_kv_head(queries: int, heads: int, size: int) -> None:
    head_of_query = []
    for local_heads in find_shared_heads(queries, heads, size):
        repeats = queries // size // len(local_heads)
        for head in local_heads:
            head_of_query += [head] * repeats
    assert head_of_query == [query // (queries // heads) for query in range(queries)]


def compare_llamas() -> list[float]:
    """Compare Llamas with each number of heads for which ranks share kv heads."""
    tp_size = torch.distributed.get_world_size()
    differences = []
    for queries, heads, size in HEAD_COUNTS:
        if size != tp_size or queries == size:
            continue
        make = partial(
            Llama, dim=4 * queries, n_heads=queries, n_kv_heads=heads, vocab=24, hidden=12 * size, layers=1
        )
        for sequence_parallel in (False, True):
            plan = make_llama_plan(queries, heads, sequence_parallel=sequence_parallel)
            ids = torch.arange(24).view(2, 12)
            differences.append(run_check(partial(compare_module, make, plan, ids)))
    return differences


@pytest.mark.ci
@pytest.mark.parametrize(
    "tp_size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_llama_with_any_number_of_kv_heads_equals_one_process(tp_size: int) -> None:
    for differences in run_ranks(tp_size, compare_llamas):
        assert differences
        assert max(differences) < TOLERANCE, differences


def compare_torchs_parallelize_module() -> float:
    torch.manual_seed(0)
    reference = Attention(16, 4, 1).double()
    model = parallelize_module(copy.deepcopy(reference), make_tp_mesh(), make_attention_plan(4, 1))
    return compare_training(model, reference, torch.randn(2, 5, 16, dtype=torch.float64))


def test_torchs_parallelize_module_applies_key_value_parallel() -> None:
    assert max(run_ranks(2, compare_torchs_parallelize_module)) < 1e-12
