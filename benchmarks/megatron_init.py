"""``initialize_model_parallel``: the dialect's against megatron-core's own.

    python benchmarks/megatron_init.py [--rounds N] [--forks N] [--only gloo|fake]

At 64 forked gloo ranks and at 16,384 ranks of the fake backend, and ours alone in larger worlds; ``making.py`` says
what is measured. Needs megatron-core (extra "oracles").
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from typing import TYPE_CHECKING, Any

import making
import paired
import torch.distributed as dist
from ranks import fake_world
from torch.distributed import distributed_c10d as c10d

from namedmesh.compat.megatron import parallel_state as ours

if TYPE_CHECKING:
    from collections.abc import Callable

GLOO_RANKS = 64
FAKE_RANKS = 16_384
WORLDS = (16_384, 131_072, 1_048_576)
GLOO_SIZES = {
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}
FAKE_SIZES = {
    "tensor_model_parallel_size": 8,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 8,
}
WITH_GLOO = {"create_gloo_process_groups": True}
NO_GLOO = {"create_gloo_process_groups": False}


def dialect(arguments: dict[str, Any]) -> Callable[[], None]:
    """Make the dialect's groups; what is returned destroys them."""
    ours.initialize_model_parallel(**arguments)
    return ours.destroy_model_parallel


def megatron_core(arguments: dict[str, Any]) -> Callable[[], None]:
    """Make megatron-core's groups; what is returned destroys them, which its own function leaves to the end."""
    from megatron.core import parallel_state

    before = set(c10d._world.pg_map)  # noqa: SLF001  torch does not list them publicly
    parallel_state.initialize_model_parallel(**arguments)

    def close() -> None:
        made = [group for group in c10d._world.pg_map if group not in before]  # noqa: SLF001  the same
        parallel_state.destroy_model_parallel()
        for group in reversed(made):
            if group in c10d._world.pg_map:  # noqa: SLF001  it destroys gloo groups itself
                dist.destroy_process_group(group)

    return close


CONTESTANTS = {"namedmesh": dialect, "megatron-core": megatron_core}


def main() -> None:
    """Print one table for each world."""
    parser = argparse.ArgumentParser(description="Megatron's groups, ours against its own.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each fork of the gloo ranks")
    parser.add_argument("--forks", type=int, default=3, help="how often the gloo ranks are forked")
    parser.add_argument("--only", choices=("gloo", "fake"), help="leave the other one out")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of optional packages that are not here
    try:
        import megatron.core  # noqa: F401  before the fork
    except ImportError:
        sys.exit('compared with megatron-core, which is not installed (extra "oracles")')
    print(paired.machine())
    with fake_world(8):
        making.take_turns(CONTESTANTS, NO_GLOO, 1)
    gc.collect()
    gc.freeze()
    if arguments.only != "fake":
        for gloo in (NO_GLOO, WITH_GLOO):
            what = GLOO_SIZES | gloo
            told = making.on_gloo(CONTESTANTS, what, GLOO_RANKS, arguments.rounds, arguments.forks)
            making.show(f"{GLOO_RANKS} forked gloo ranks, {_words(what)}", *told)
    if arguments.only != "gloo":
        what = FAKE_SIZES | NO_GLOO
        told = making.on_fake(CONTESTANTS, what, FAKE_RANKS, arguments.rounds * arguments.forks)
        making.show(f"{FAKE_RANKS:,} ranks of the fake backend, {_words(what)}", *told)
        measured = {}
        for world_size in WORLDS:
            seconds, last = making.on_fake({"namedmesh": dialect}, what, world_size, arguments.rounds)
            measured[world_size] = seconds["namedmesh"], last["namedmesh"]
        making.show_sizes(f"namedmesh alone, {_words(what)}; medians of {arguments.rounds} rounds", measured)


def _words(arguments: dict[str, Any]) -> str:
    sizes = [f"{name.split('_')[0]} {size}" for name, size in arguments.items() if name.endswith("_size")]
    gloo = "gloo groups" if arguments["create_gloo_process_groups"] else "no gloo groups"
    return ", ".join([*sizes, gloo])


if __name__ == "__main__":
    main()
