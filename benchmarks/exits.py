"""How jobs end: ranks that come to the interpreter's normal exit with groups in every state.

    python benchmarks/exits.py [--runs N] [--processes]

A reference to a process group that outlives the default group lets the threads behind it outlive the interpreter,
which then aborts: not always, so there are many runs. Each run is one job, in which every rank ends in another way.
"control" is torch alone with such a reference; where it never aborts, the figures of the others say little. That is
so in forked ranks, which are cheap; ``--processes`` starts an interpreter for each rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import paired  # noqa: F401  finds the tests' models
import tiny
import torch
import torch._dynamo  # every fork would import it
import torch.distributed as dist
import torch.distributed.tensor.parallel

import namedmesh
from namedmesh.compat import megatron
from namedmesh.tensor_parallel import parallelize

if TYPE_CHECKING:
    from collections.abc import Callable

# What a program keeps in its globals until the interpreter clears them.
kept: dict[str, Any] = {}


def _mesh() -> namedmesh.NamedMesh:
    """Return a mesh that a dialect is bound to, after collectives on groups made at once and made on first use."""
    dist.init_process_group("gloo")
    mesh = kept["mesh"] = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
    megatron.bind(mesh)
    groups = [None, mesh.group("tp"), megatron.parallel_state.get_tensor_and_data_parallel_group()]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    kept["group"] = mesh.group("tp")
    return mesh


def control() -> None:
    """A reference to the default group that outlives it, whatever namedmesh does."""
    _mesh()
    kept["world"] = dist.group.WORLD
    dist.destroy_process_group()


def dialect_destroyed() -> None:
    """As Megatron's programs end."""
    _mesh()
    del kept["group"]
    megatron.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def closed() -> None:
    """In order."""
    mesh = _mesh()
    del kept["group"]
    mesh.close()
    dist.destroy_process_group()


def not_closed() -> None:
    """The mesh is left open."""
    _mesh()
    del kept["group"]
    dist.destroy_process_group()


def nothing_closed() -> None:
    """Neither the mesh nor the default group, and a group is kept."""
    _mesh()


def closed_twice() -> None:
    """The mesh and the dialect, twice each."""
    mesh = _mesh()
    del kept["group"]
    for _ in range(2):
        mesh.close()
        megatron.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def wrong_order() -> None:
    """The default group before the mesh and the dialect."""
    mesh = _mesh()
    del kept["group"]
    dist.destroy_process_group()
    mesh.close()
    megatron.parallel_state.destroy_model_parallel()


def model_kept() -> None:
    """A tensor-parallel model and its optimizer live until the interpreter clears the globals."""
    mesh = _mesh()
    del kept["group"]
    plan = {
        "*.up": namedmesh.tensor_parallel.ColwiseParallel(),
        "*.down": namedmesh.tensor_parallel.RowwiseParallel(),
    }
    kept["model"] = parallelize(tiny.model(), mesh["tp"], plan, src_data_rank=None)
    kept["optimizer"] = torch.optim.AdamW(kept["model"].parameters())
    dist.destroy_process_group()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        control,
        dialect_destroyed,
        closed,
        not_closed,
        nothing_closed,
        closed_twice,
        wrong_order,
        model_kept,
    )
}


RANKS = len(CASES)


def _environment(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the store
        "OMP_NUM_THREADS": "1",
    }


def forked(cases: list[str]) -> list[int]:
    """Fork the ranks; each runs its case, and leaves by ``sys.exit``. Negative exit codes are signals."""
    pids: list[int] = []
    channels: list[int] = []
    for rank, case in enumerate(cases):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            for channel in (*channels, theirs):
                os.close(channel)
            gc.freeze()
            os.environ.update(_environment(rank, int(os.read(ours, 16))))
            CASES[case]()
            sys.exit(0)
        os.close(ours)
        pids.append(pid)
        channels.append(theirs)
    # The store has threads, so it comes after the forks, which wait for its port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for channel in channels:
        os.write(channel, str(store.port).encode())
        os.close(channel)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def started(cases: list[str]) -> list[int]:
    """Start an interpreter for each rank; one that does not end in time counts as failed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(  # noqa: S603  this file
            [sys.executable, __file__, "--case", case], env=os.environ | _environment(rank, store.port)
        )
        for rank, case in enumerate(cases)
    ]
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(300))
        except subprocess.TimeoutExpired:  # noqa: PERF203  each rank has its own
            process.kill()
            process.wait()
            codes.append(1)
    return codes


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description="How jobs end.")
    parser.add_argument("--runs", type=int, default=100, help="how often each case is run")
    parser.add_argument("--processes", action="store_true", help="start an interpreter for each rank")
    parser.add_argument("--case", choices=CASES, help="be one rank that ends in this way")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.case:
        CASES[arguments.case]()
        return
    names, failed = list(CASES), Counter[str]()
    for run in range(arguments.runs):
        cases = [names[(rank + run) % RANKS] for rank in range(RANKS)]
        codes = (started if arguments.processes else forked)(cases)
        failed.update(case for case, code in zip(cases, codes, strict=True) if code)
        if any(codes):
            print(f"run {run}: {dict(zip(cases, codes, strict=True))}", flush=True)
    for name in names:
        print(f"{name}: {failed[name]} of {arguments.runs} failed", flush=True)


if __name__ == "__main__":
    main()
