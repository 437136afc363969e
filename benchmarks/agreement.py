"""What a coordinated call costs on one rank as the job grows, over a real TCPStore.

    python benchmarks/agreement.py [--ranks 1024 8192 65536]

The process is one rank of a large job. The keys that the other ranks would have written are in the store already, so
the figures are the time of this rank alone, without waiting: of a usual rank, of rank 0 in its first call, where it
sends the prefix of the run to all others, and of the rank that finds which of the requests differs.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist

from namedmesh import AgreementError
from namedmesh.launch.agreement import agree_on
from namedmesh.launch.coordinator import StoreCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = timedelta(minutes=5)
REQUEST = {"layout": "Layout(pp=8, dp=128, cp=2, tp=8)", "options": {}, "device": "cuda", "torch": "2.13.0"}


def measure(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def agree(coordinator: StoreCoordinator) -> None:
    """Make one coordinated call."""
    with agree_on("init_mesh", TIMEOUT, coordinator) as compare:
        compare(REQUEST)


def measure_first_call(store: Any, num_ranks: int) -> float:
    """Rank 0 in its first call, in which it sends the prefix to all other ranks."""
    coordinator = StoreCoordinator(store, 0, num_ranks)
    root: Any = dist.PrefixStore("namedmesh", store)
    for _ in range(num_ranks - 1):
        root.append("nonces", uuid4().hex)
    run: Any = coordinator.run_store("init_mesh", TIMEOUT)
    phase = dist.PrefixStore("1/request", run)
    phase.set("result", "ok")  # all other ranks wait for the prefix only
    return measure(lambda: coordinator.serve_run_prefix(phase, "result", time.monotonic() + 300))


def measure_usual_call(store: Any, num_ranks: int) -> float:
    """A rank in a call in which all requests are equal."""
    coordinator = StoreCoordinator(store, 0, num_ranks)
    run: Any = coordinator.run_store("init_mesh", TIMEOUT)
    agree_once(coordinator, run, num_ranks, 1)
    return measure(lambda: agree_once(coordinator, run, num_ranks, 2))


def agree_once(coordinator: StoreCoordinator, run: Any, num_ranks: int, call: int) -> None:
    """Make one call in which the other ranks have arrived."""
    for phase in ("request", "done"):
        run.add(f"{call}/{phase}/arrived", num_ranks - 1)
    agree(coordinator)


def measure_failed_call(store: Any, num_ranks: int) -> float:
    """The rank that reads all requests, because one of them differs."""
    coordinator = StoreCoordinator(store, 0, num_ranks)
    run: Any = coordinator.run_store("init_mesh", TIMEOUT)
    texts = {"call": "init_mesh", **{name: str(value) for name, value in REQUEST.items()}}
    text = json.dumps(["", texts])
    keys = [f"1/request/record/{rank}" for rank in range(1, num_ranks)]
    for first in range(0, len(keys), 128):
        part = keys[first : first + 128]
        run.multi_set(part, [text] * len(part))
    run.set(keys[-1], text.replace("tp=8", "tp=4"))
    run.set("1/request/first", "the digest of another rank")
    run.add("1/request/arrived", num_ranks - 1)
    run.add("1/request/records", num_ranks - 1)
    run.add("1/request/num_readers", num_ranks - 1)

    def call() -> None:
        problems = ""
        try:
            agree(coordinator)
        except AgreementError as error:
            problems = str(error)
        if f"tp=4) on rank {num_ranks - 1}" not in problems:
            raise RuntimeError(f"the difference was not found: {problems}")

    return measure(call)


def main() -> None:
    """Print one line for each size of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 8192, 65536])
    arguments = parser.parse_args()
    print("ranks | a usual call | rank 0 sends the prefix | one rank finds a difference")
    for num_ranks in arguments.ranks:
        figures = []
        for function in (measure_usual_call, measure_first_call, measure_failed_call):
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=TIMEOUT)
            figures.append(f"{1000 * function(store, num_ranks):.1f} ms")
        print(f"{num_ranks} | {' | '.join(figures)}")


if __name__ == "__main__":
    main()
