"""Every collective of the styles and layers matters: without it, or with it twice, some check sees it.

The call sites are read from the source. For each of them a mutant of the collective takes its place, at that
site only, and the checks that pass through the site run again.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import pkgutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
import tiny
import torch
from ranks import run_ranks
from threads import run_threads
from torch.distributed.tensor import DTensor
from tp_checks import CHECKS, largest_difference

import namedmesh.tensor_parallel as package
from namedmesh.compat import layers, partition
from namedmesh.compat.megatron.tensor_parallel import layers as megatron_layers
from namedmesh.tensor_parallel import collectives
from namedmesh.tensor_parallel.collectives import Pending, RankGroup, my_shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import Tensor

WORLD = 2
TOLERANCE = 1e-9


class Site(NamedTuple):
    """Where a collective is called."""

    module: str
    line: int
    collective: str


def _copies(tensor: Tensor, peers: RankGroup, dim: int) -> Tensor:
    return torch.cat([tensor] * peers.size, dim)


# What takes a collective's place: as if nobody communicated.
REMOVED: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda tensor, *_args, **_kwargs: tensor.clone(),
    "start_all_reduce": lambda tensor, *_args, **_kwargs: Pending(tensor.clone()),
    "all_gather": _copies,
    "start_all_gather": lambda *args: Pending(_copies(*args)),
    "reduce_scatter": my_shard,
    "start_reduce_scatter": lambda *args: Pending(my_shard(*args)),
    "all_to_all": lambda outgoing, *_args: outgoing.clone(),
    "sum_forward": lambda partial, _peers: partial,
    "sum_backward": lambda replicated, _peers: replicated,
    "gather": _copies,
    "gather_parts": _copies,
    "split": my_shard,
    "sum_scatter": my_shard,
}
# A DTensor is moved to another layout where torch's arithmetic is used: only those moves that a check comes by.
MOVES: dict[str, Callable[..., Any]] = {
    "redistribute": lambda tensor, *_args, **_kwargs: tensor,
    "whole_parameter": tiny.shard,
}
# The same collective once more, on its own result. Sums only: a gather of a gather has another shape.
DOUBLED: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda tensor, peers, operation="sum", **_: collectives.all_reduce(
        collectives.all_reduce(tensor, peers, operation), peers, operation
    ),
    "start_all_reduce": lambda tensor, peers, operation="sum", **_: collectives.start_all_reduce(
        collectives.all_reduce(tensor, peers, operation), peers, operation
    ),
    "reduce_scatter": lambda full, peers, dim: collectives.reduce_scatter(
        collectives.all_reduce(full, peers), peers, dim
    ),
    "start_reduce_scatter": lambda full, peers, dim: collectives.start_reduce_scatter(
        collectives.all_reduce(full, peers), peers, dim
    ),
    "sum_forward": lambda partial, peers: collectives.sum_forward(
        collectives.sum_forward(partial, peers), peers
    ),
    "sum_backward": lambda replicated, peers: collectives.sum_backward(
        collectives.sum_backward(replicated, peers), peers
    ),
    "sum_scatter": lambda partial, peers, dim: collectives.sum_scatter(
        collectives.sum_forward(partial, peers), peers, dim
    ),
}


def modules() -> list[ModuleType]:
    names = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    return [*map(importlib.import_module, names), partition, layers, megatron_layers]


def sites_of(module: ModuleType) -> dict[Site, bool]:
    """The calls of collectives in a module, and which of them sum; not those that make one out of another."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    own = [
        node
        for node in tree.body
        if not (module is collectives and isinstance(node, ast.FunctionDef) and node.name in REMOVED)
    ]
    return {
        # The highest of the highest is the highest: to do that twice changes nothing.
        Site(module.__name__, call.lineno, call.func.id): "max"
        not in map(ast.literal_eval, filter(is_text, call.args))
        for node in own
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in REMOVED
    }


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def pairs() -> dict[Site, Any]:
    """The collectives that compute a function or its backward, each with the cell that holds it."""
    names = {getattr(collectives, name): name for name in REMOVED}
    found, seen = {}, set()
    for module in (collectives, *modules()):
        for attribute, value in vars(module).items():
            function = autograd_function(value)
            if function is None or function in seen:
                continue
            seen.add(function)
            for line, method in enumerate((function.forward, function.backward)):
                for cell in method.__closure__ or ():
                    if (name := names.get(cell.cell_contents)) is not None:
                        found[Site(f"{module.__name__}.{attribute}", line, name)] = cell
    return found


def autograd_function(value: object) -> Any:
    """The class behind a collective that was made with its backward."""
    for cell in (getattr(value, "__closure__", None) or ()) if inspect.isfunction(value) else ():
        made = getattr(cell.cell_contents, "__self__", None)
        if inspect.isclass(made) and issubclass(made, torch.autograd.Function):
            return made
    return None


class Switch:
    """Stands in for a collective everywhere, notes who calls it, and at one site lets a mutant answer."""

    def __init__(
        self, name: str, original: Callable[..., Any], site: Site | None, mutant: Any, at: Site | None = None
    ) -> None:
        self.name, self.original, self.site, self.mutant, self.at = name, original, site, mutant, at
        self.reached: set[Site] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2 if self.name == "redistribute" else 1)
        site = self.at or Site(caller.f_globals["__name__"], caller.f_lineno, self.name)
        self.reached.add(site)
        return (self.mutant if site == self.site else self.original)(*args, **kwargs)


def run_check(
    check: Callable[[], Any], site: Site | None = None, mutant: Any = None
) -> tuple[float, set[Site]]:
    """The largest difference on any rank (infinite where a rank fails), and the sites that were reached."""
    names = (*REMOVED, "whole_parameter")
    originals: dict[str, Callable[..., Any]] = {name: getattr(collectives, name) for name in names}
    switches = []
    with ExitStack() as stack:
        for at, cell in pairs().items():
            switches.append(Switch(at.collective, cell.cell_contents, site, mutant, at))
            stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = switches[-1]
        for module in modules():
            for name, original in originals.items():
                if getattr(module, name, None) is original:
                    switches.append(Switch(name, original, site, mutant))
                    stack.enter_context(mock.patch.object(module, name, switches[-1]))
        moves = Switch("redistribute", DTensor.redistribute, site, mutant)
        switches.append(moves)
        method = lambda self, *args, **kwargs: moves(self, *args, **kwargs)  # noqa: E731  a method, with a self
        stack.enter_context(mock.patch.object(DTensor, "redistribute", method))
        try:
            worst = max(run_threads(WORLD, largest_difference, check))
        except AssertionError:
            worst = math.inf
    reached = set().union(*(switch.reached for switch in switches))
    return worst, {found for found in reached if found.module.startswith("namedmesh.")}


def survivors() -> tuple[set[Site], list[str], int]:
    """The sites that no check reaches, the mutants that no check sees, and how many mutants there were."""
    reached: dict[Site, list[Callable[[], Any]]] = {}
    for check in CHECKS:
        worst, sites = run_check(check)
        assert worst < TOLERANCE, f"{check.__name__}: {worst}"
        for site in sites:
            reached.setdefault(site, []).append(check)
    every = {site: sums for module in modules() for site, sums in sites_of(module).items()}
    every |= dict.fromkeys(pairs(), True)
    alive, count = [], 0
    for site in sorted(site for site in reached if site in every or site.collective in MOVES):
        for kind, mutants in (("removed", REMOVED | MOVES), ("doubled", DOUBLED)):
            mutant = mutants.get(site.collective)
            if mutant is None or (kind == "doubled" and not every.get(site)):
                continue
            count += 1
            if not any(run_check(check, site, mutant)[0] > 1e-6 for check in reached[site]):
                alive.append(f"{site.module.rpartition('.')[2]}.py:{site.line}: {site.collective} {kind}")
    return set(every) - set(reached), alive, count


def test_a_check_sees_every_collective_that_is_removed_or_doubled() -> None:
    ((missed, alive, count),) = run_ranks(1, survivors, init=False, timeout=280)
    assert missed == set()
    assert alive == []
    assert count > 40


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_checks_hold_on_four_ranks(check: Callable[[], Any]) -> None:
    assert max(run_ranks(1, run_threads, 4, largest_difference, check, init=False)[0]) < TOLERANCE
