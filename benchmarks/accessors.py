"""What an accessor costs: ours, Megatron's, and torch's own, in one run.

    python benchmarks/accessors.py [--rounds N]

Nanoseconds of one call, written as a training loop would write it, in a world of the fake backend. Needs
megatron-core (extra "oracles"); the ratios are to its ``get_tensor_model_parallel_world_size()``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import timeit
import warnings
from functools import partial
from typing import Any

import paired
from ranks import fake_world

import namedmesh

RANKS = 16
REFERENCE = "parallel_state.get_tensor_model_parallel_world_size()"
# Megatron answers from a variable after set_tensor_model_parallel_world_size(), as tools without groups use it.
PINNED = f"{REFERENCE}  # pinned"
OURS = ('mesh.size("tp")', 'mesh.rank("tp")', 'mesh.group("tp")', 'mesh["tp"]')
OTHERS = (
    REFERENCE,
    PINNED,
    "get_tensor_model_parallel_world_size()",
    'device_mesh.get_group("tp")',
    'device_mesh.get_local_rank("tp")',
    'device_mesh["tp"]',
)
# About as long a turn for each: torch slices in a tenth of a millisecond.
CALLS = {
    'device_mesh["tp"]': 300,
    'device_mesh.get_group("tp")': 20_000,
    'device_mesh.get_local_rank("tp")': 10_000,
}
USUAL_CALLS = 100_000


def measure(rounds: int) -> dict[str, list[float]]:
    """Return seconds of one call, by what is called, round by round."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages that are not here
        from megatron.core import parallel_state
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    mesh = namedmesh.init_mesh(pp=2, dp=-1, tp=2, device="cpu")
    names = {
        "parallel_state": parallel_state,
        "get_tensor_model_parallel_world_size": parallel_state.get_tensor_model_parallel_world_size,
        "mesh": mesh,
        "device_mesh": mesh.device_mesh,
    }
    assert mesh.size("tp") == parallel_state.get_tensor_model_parallel_world_size()
    assert mesh.rank("tp") == parallel_state.get_tensor_model_parallel_rank()
    contestants = {
        call: partial(
            _seconds, timeit.Timer(call, globals=names, timer=time.process_time), CALLS.get(call, USUAL_CALLS)
        )
        for call in (*OTHERS, *OURS)
    }
    contestants[PINNED] = partial(_seconds_pinned, parallel_state, contestants[PINNED].args[0], USUAL_CALLS)
    seconds = paired.interleaved(contestants, rounds)
    mesh.close()
    parallel_state.destroy_model_parallel()
    return seconds


def _seconds_pinned(parallel_state: Any, timer: timeit.Timer, calls: int) -> float:
    parallel_state.set_tensor_model_parallel_world_size(2)
    try:
        return _seconds(timer, calls)
    finally:
        parallel_state.set_tensor_model_parallel_world_size(None)


def _seconds(timer: timeit.Timer, calls: int) -> float:
    return timer.timeit(calls) / calls


def main() -> None:
    """Print one line for each call."""
    parser = argparse.ArgumentParser(description="The cost of asking a mesh.")
    parser.add_argument("--rounds", type=int, default=51)
    rounds = parser.parse_args().rounds
    try:
        with fake_world(RANKS):
            seconds = measure(rounds)
    except ImportError:
        sys.exit("the accessors are compared with megatron-core, which is not installed (extra 'oracles')")
    widths = [54, 10, 9]
    print(f"{paired.machine()}; medians of {rounds} rounds")
    print(paired.row(["", "ns", "ratio"], widths))
    for call, measured in seconds.items():
        nanoseconds = f"{statistics.median(measured) * 1e9:,.0f}"
        print(paired.row([call, nanoseconds, paired.ratio(measured, seconds[REFERENCE])], widths))


if __name__ == "__main__":
    main()
