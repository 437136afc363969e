"""All the ranks of a world as threads of one process, with real collectives between them."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def run_threads(world_size: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Run ``function(*args)`` as every rank of a world, and return every rank's result, in rank order.

    The arguments are shared. A rank that raises fails the test, with every rank's traceback in the message.
    """
    values: dict[int, T] = {}
    tracebacks: dict[int, str] = {}
    store = dist.HashStore()
    excepthook = sys.excepthook  # every init_process_group wraps it once more

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            values[rank] = function(*args)
        except BaseException as error:  # noqa: BLE001  reported below
            tracebacks[rank] = traceback.format_exc()
            threaded.ProcessLocalGroup.exception_handle(error)  # lets the others out of their collectives
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threaded._install_threaded_pg()
    c10d: Any = torch._C._distributed_c10d  # of which torch's annotations leave out something
    c10d._set_thread_isolation_mode(True)
    try:
        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        sys.excepthook = excepthook
    if tracebacks:
        told = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items()))
        raise AssertionError(f"{len(tracebacks)} of {world_size} ranks failed\n{told}")
    return [values[rank] for rank in range(world_size)]
