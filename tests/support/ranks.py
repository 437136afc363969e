"""Worlds for tests: real gloo ranks forked from this process, and a fake world of any size.

Forking after torch is imported is far cheaper than starting interpreters. The parent hosts the store, made
after the last fork (its server thread must not be copied into a child), so no rank has to outlive the others
and no port is guessed. What torch imports on first use is imported here: otherwise every rank would do it again.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
import warnings
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's, about itself
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if not torch.accelerator.is_available():  # with one, forked ranks run no backward after the parent's
        # The first backward starts a thread for each device, after which no forked child may run a backward. From the
        # first compilation on, a CUDA build without a device counts one: what runs before it starts no thread.
        torch.ones(1, requires_grad=True).neg().backward()
        # The first compilation of a process imports the backends, and more.
        torch.compile(torch.neg, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()
        torch._dynamo.reset()
    # For its logs torch measures the guards of every graph, after it has emptied the processor's caches.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # For its messages torch notes the stack at every fake mode, of which DTensor makes one for each new operation.
    torch._subclasses.fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=list)  # type: ignore[assignment]

# torch's store asks for the name of each address that it connects to, and waits 5 s where a name server's answer is lost.
os.environ["RES_OPTIONS"] = "timeout:1"

# What torchrun sets, and so does run_ranks. A user's shell, and the ranks of other launchers, do not have it.
TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)

T = TypeVar("T")

TORCH = Version(torch.__version__)


# What one rank sends back: "value" and its value, or "error" and the text of its traceback.
Outcome = tuple[str, Any]


def run_ranks(
    world_size: int, function: Callable[..., T], *args: Any, timeout: float = 90.0, init: bool = True
) -> list[T]:
    """Run ``function(*args)`` on ``world_size`` forked ranks and return every rank's result, in rank order.

    Each rank is in an initialized default group (unless ``init`` is false), with the variables that torchrun
    sets. A rank that raises, dies or does not answer within ``timeout`` seconds fails the test, with every
    rank's traceback in the message.
    """
    context = multiprocessing.get_context("fork")
    channels: list[Connection] = []
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank_main, args=(theirs, rank, world_size, init, timeout, function, args)
        )
        process.start()
        theirs.close()
        channels.append(ours)
        processes.append(process)
    outcomes = _collect_all(channels, timeout)
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
    failed = [
        f"--- rank {rank}: {kind}\n{text}" for rank, (kind, text) in enumerate(outcomes) if kind != "value"
    ]
    if failed:
        raise AssertionError("\n".join([f"{len(failed)} of {world_size} ranks failed", *failed]))
    return [value for _, value in outcomes]


def _collect_all(channels: list[Connection], timeout: float) -> list[Outcome]:
    """Host the store until every rank has answered; its server thread ends with this frame.

    A failing test keeps the frames that it came through, and a store in one of them would be forked into the
    ranks of later tests.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for channel in channels:
        channel.send(store.port)
    deadline = time.monotonic() + timeout
    outcomes = [_collect(channel, deadline) for channel in channels]
    for channel in channels:
        with suppress(BrokenPipeError):  # a rank that failed has ended
            channel.send("every rank has answered")
    return outcomes


def _collect(channel: Connection, deadline: float) -> Outcome:
    try:
        if channel.poll(max(0.0, deadline - time.monotonic())):
            outcome: Outcome = channel.recv()
            return outcome
    except EOFError:
        return "lost", "the process ended without sending a result"
    return "lost", "no result within the time allowed"


def _rank_main(  # noqa: PLR0917  multiprocessing passes them by position
    channel: Connection,
    rank: int,
    world_size: int,
    init: bool,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # To look for garbage among the parent's objects would copy all of them; no rank lives long enough to need it.
    gc.disable()
    gc.freeze()
    faulthandler.dump_traceback_later(max(1.0, timeout - 2), file=2)
    # A shell has it ignored in what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    port = channel.recv()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent hosts the store, as torchrun's agent does
    )
    # DTensor takes equal meshes for one: a mesh of a fake world of the parent's, where it was rank 0, is another's.
    _clear_sharding_prop_cache()
    # torch makes its autograd engine anew in a forked process, at its first use and without a lock: two threads that
    # are first together end the process.
    torch.ones(1, requires_grad=True).square()
    try:
        if init:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        channel.send(("value", function(*args)))
        # A rank that ends takes its connections from those that are still at a group's first handshake.
        channel.poll(timeout)
    except BaseException:  # noqa: BLE001  every traceback is sent, SystemExit's too
        channel.send(("error", traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        channel.close()
        # Skip the interpreter's exit: nothing of the parent's (pytest, its plugins) may run a second time.
        os._exit(0)


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default group of the fake backend: any world size, any rank, one process, nothing communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def live_groups() -> int:
    """How many process groups torch knows in this process, the default group included."""
    return len(c10d._world.pg_map)


def summed(group: dist.ProcessGroup | None, value: float = 1.0) -> float:
    """The sum of every member's value: the group works, and has the members that it should have."""
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port that no other process is given while this one lives; whoever names it may listen there."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _reserved.append(holder)
    return int(holder.getsockname()[1])
