"""What an accessor costs: ours, Megatron's, and torch's own, in one run; and each of Megatron's dialect beside megatron-core's.

    python benchmarks/accessors.py [--rounds N]

Nanoseconds of one call, as a training loop writes it, in a world of the fake backend with the same groups on all sides. Needs
megatron-core (extra "oracles").
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
import warnings
from typing import TYPE_CHECKING

import paired
from ranks import fake_world

import namedmesh
from namedmesh.compat.megatron import parallel_state as dialect

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

RANKS = 16
REFERENCE = "parallel_state.get_tensor_model_parallel_world_size()"
# How many calls are a turn: about as long a turn for each.
CALLS = {
    REFERENCE: 100_000,
    'mesh.size("tp")': 100_000,
    'mesh.rank("tp")': 100_000,
    'mesh.group("tp")': 100_000,
    'mesh["tp"]': 100_000,
    'device_mesh.get_group("tp")': 20_000,
    'device_mesh.get_local_rank("tp")': 10_000,
    'device_mesh["tp"]': 300,
}
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


def timer(statement: str, calls: int, **names: object) -> Callable[[], float]:
    """Return what measures the seconds of a call, of the processor's time."""
    made = timeit.Timer(statement, globals=names, timer=time.process_time)
    return lambda: made.timeit(calls) / calls


def of_the_mesh(parallel_state: ModuleType, rounds: int) -> dict[str, list[float]]:
    mesh = namedmesh.init_mesh(pp=2, dp=-1, cp=2, tp=2, device="cpu")
    names = {"parallel_state": parallel_state, "mesh": mesh, "device_mesh": mesh.device_mesh}
    assert mesh.size("tp") == parallel_state.get_tensor_model_parallel_world_size()
    contestants = {call: timer(call, calls, **names) for call, calls in CALLS.items()}
    seconds = paired.interleaved(contestants, rounds)
    mesh.close()
    return seconds


def of_the_dialect(parallel_state: ModuleType, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each accessor that answers something, in the release that is installed."""
    prefixes = ("get_", "is_", "model_parallel_is_", "has_")
    found = [name for name in vars(dialect) if name.startswith(prefixes) and hasattr(parallel_state, name)]
    measured = {}
    for name in sorted(set(found) - LEFT_OUT):
        pair = {"ours": getattr(dialect, name), "theirs": getattr(parallel_state, name)}
        for call in pair.values():
            call()  # what is made when it is first asked for is made
        contestants = {whose: timer("call()", 20_000, call=call) for whose, call in pair.items()}
        measured[name] = paired.interleaved(contestants, rounds)
    return measured


def line(name: str, seconds: list[float], ratio: float) -> None:
    print(f"{name:54} {statistics.median(seconds) * 1e9:10,.0f} {ratio:9.2f}")


def main() -> None:
    """Print one line for each call, and the ten accessors of the dialect that are dearest beside megatron-core's."""
    parser = argparse.ArgumentParser(description="The cost of asking a mesh.")
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")  # of optional packages that are not here
    from megatron.core import parallel_state

    print(f"{paired.machine()}; medians of {rounds} rounds, nanoseconds")
    with fake_world(RANKS, 5):
        for module in (dialect, parallel_state):
            module.initialize_model_parallel(**SIZES)
        seconds = of_the_mesh(parallel_state, rounds)
        for call, measured in seconds.items():
            line(call, measured, paired.ratio(measured, seconds[REFERENCE]))
        accessors = of_the_dialect(parallel_state, rounds)
        ratios = {name: paired.ratio(*pair.values()) for name, pair in accessors.items()}
        print(
            f"\nthe dialect's {len(ratios)} accessors, to megatron-core's: {statistics.median(ratios.values()):.2f}"
        )
        for name in sorted(ratios, key=lambda name: -ratios[name])[:10]:
            line(name, accessors[name]["ours"], ratios[name])
        for module in (dialect, parallel_state):
            module.destroy_model_parallel()


if __name__ == "__main__":
    main()
