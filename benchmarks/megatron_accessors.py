"""What each of Megatron's accessors costs: the dialect's against megatron-core's, in one run.

    python benchmarks/megatron_accessors.py [--rounds N] [--all]

Nanoseconds of one call with default arguments, in a world of 16 ranks of the fake backend, with the same groups on
both sides. Needs megatron-core (extra "oracles").
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import timeit
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import paired
from ranks import fake_world

from namedmesh.compat.megatron import parallel_state as ours

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

RANKS = 16
CALLS = 20_000
SIZES = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "num_distributed_optimizer_instances": 2,
    "hierarchical_context_parallel_sizes": [2],
    "create_gloo_process_groups": False,
}
# Deprecated ones warn at each call; these need arguments, or something that a CPU does not have.
LEFT_OUT = {
    "get_data_modulo_expert_parallel_group",
    "get_nccl_options",
    "get_data_parallel_group_gloo",
    "get_expert_data_parallel_group_gloo",
    "get_global_symmetric_memory_buffer",
    "get_hybrid_data_context_parallel_groups",
    "is_unitialized",
}


def accessors(theirs: ModuleType) -> list[str]:
    """Return the names that answer something, in the release that is installed."""
    prefixes = ("get_", "is_", "model_parallel_is_", "has_")
    names = [name for name in sorted(vars(ours)) if name.startswith(prefixes) and hasattr(theirs, name)]
    return [name for name in names if name not in LEFT_OUT]


def measure(rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds of one call of ours and of theirs, by accessor, round by round."""
    from megatron.core import parallel_state as theirs

    for module in (ours, theirs):
        module.initialize_model_parallel(**SIZES)
    measured = {}
    for name in accessors(theirs):
        pair: dict[str, Callable[[], float]] = {}
        for whose, module in (("ours", ours), ("theirs", theirs)):
            pair[whose] = partial(
                _seconds,
                timeit.Timer("call()", globals={"call": getattr(module, name)}, timer=time.process_time),
            )
            getattr(module, name)()  # what is made when it is first asked for is made
        seconds = paired.interleaved(pair, rounds)
        measured[name] = (seconds["ours"], seconds["theirs"])
    for each in (ours, theirs):
        each.destroy_model_parallel()
    return measured


def _seconds(timer: timeit.Timer) -> float:
    return timer.timeit(CALLS) / CALLS


def main() -> None:
    """Print one line for each accessor, or for the dearest ones."""
    parser = argparse.ArgumentParser(description="The cost of Megatron's accessors.")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--all", action="store_true", help="every accessor instead of the ten dearest")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of optional packages that are not here
    try:
        with fake_world(RANKS, 5):
            measured = measure(arguments.rounds)
    except ImportError:
        sys.exit('compared with megatron-core, which is not installed (extra "oracles")')
    ratios: dict[str, Any] = {name: paired.ratio(*pair) for name, pair in measured.items()}
    dearest = sorted(ratios, key=lambda name: -ratios[name])
    widths = [50, 8, 8, 8]
    print(f"{paired.machine()}; medians of {arguments.rounds} rounds, nanoseconds")
    print(paired.row(["", "ours", "theirs", "ratio"], widths))
    for name in dearest if arguments.all else dearest[:10]:
        ours_ns, theirs_ns = (f"{statistics.median(seconds) * 1e9:.0f}" for seconds in measured[name])
        print(paired.row([name, ours_ns, theirs_ns, ratios[name]], widths))
    print(
        paired.row(
            [f"the median of {len(ratios)} accessors", "", "", statistics.median(ratios.values())], widths
        )
    )


if __name__ == "__main__":
    main()
