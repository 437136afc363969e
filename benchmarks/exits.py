"""How jobs end: forked ranks that come to the interpreter's normal exit with groups in every state.

    python benchmarks/exits.py [--runs N] [--ranks N] [--case NAME ...]

A reference to a process group that outlives the default group lets the threads behind it outlive the interpreter,
which then aborts: not always, so a case is run many times. "control" is plain torch that keeps such a reference;
where it never aborts, the figures of the others say little.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import paired  # noqa: F401  finds the tests' models
import tiny
import torch
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
    """A mesh that a dialect is bound to, after collectives on groups made at once and made on first use."""
    dist.init_process_group("gloo")
    mesh = kept["mesh"] = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
    megatron.bind(mesh)
    groups = [None, mesh.group("tp"), megatron.parallel_state.get_tensor_and_data_parallel_group()]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    kept["group"] = mesh.group("tp")
    return mesh


def control() -> None:
    """Plain torch: a reference to the default group that outlives it."""
    dist.init_process_group("gloo")
    kept["world"] = dist.group.WORLD
    dist.all_reduce(torch.ones(4))
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
    net = tiny.model()
    plan = {
        "*.up": namedmesh.tensor_parallel.ColwiseParallel(),
        "*.down": namedmesh.tensor_parallel.RowwiseParallel(),
    }
    kept["model"] = parallelize(net, mesh["tp"], plan)
    tiny.losses(net, tiny.batch(4), steps=1)
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


def exit_codes(case: Callable[[], None], ranks: int) -> list[int]:
    """Fork the ranks; each runs the case, and leaves by ``sys.exit``. Negative codes are signals."""
    pids: list[int] = []
    channels: list[int] = []
    for rank in range(ranks):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            for channel in (*channels, theirs):
                os.close(channel)
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=os.read(ours, 16).decode(),
                TORCHELASTIC_USE_AGENT_STORE="True",  # the parent hosts the store
            )
            case()
            sys.exit(0)
        os.close(ours)
        pids.append(pid)
        channels.append(theirs)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for channel in channels:
        os.write(channel, str(store.port).encode())
        os.close(channel)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description="How jobs end.")
    parser.add_argument("--runs", type=int, default=100, help="how often each case is run")
    parser.add_argument("--ranks", type=int, default=8, help="how many ranks, an even number")
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES), help="leave the others out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.case:
        start = time.monotonic()
        failed = [
            codes for _ in range(arguments.runs) if any(codes := exit_codes(CASES[name], arguments.ranks))
        ]
        seconds = (time.monotonic() - start) / arguments.runs
        print(
            f"{name}: {len(failed)} of {arguments.runs} failed {failed[:3]} ({seconds:.1f} s a run)",
            flush=True,
        )


if __name__ == "__main__":
    main()
