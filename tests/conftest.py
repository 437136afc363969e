"""What every test starts from: one thread a process, and no process group left behind.

xdist reads this file once more in the process that only hands tests to its workers, before it starts them: what takes
long to import waits until tests are collected.
"""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec

os.environ["OMP_NUM_THREADS"] = "1"

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# A program as its users write it: it imports a package that only some tests put in place.
collect_ignore = ["support/old_llama.py"]

# The files that take longest come first, those between them that wait most of the time (hosts, agreement, launch, doctor):
# while one worker waits, two compute, and none is left with a long file in the end.
LONGEST = (
    "test_two_hosts",
    "test_elastic",
    "test_training_pipeline",
    "test_example",
    "test_tp_sweep",
    "test_tp_modes",
    "test_agreement",
    "test_tp_wirings",
    "test_book",
    "test_readme",
    "test_launch",
    "test_megatron_state",
    "test_tp_checks",
    "test_training_experts",
    "test_doctor",
    "test_mesh_training",
    "test_mesh_states",
    "test_training_checkpoints",
    "test_training_checkpoint_integrity",
    "test_legacy_groups",
    "test_mesh_ranks",
)


def pytest_collection() -> None:
    gc.disable()  # nothing that is imported is garbage
    import torch
    from hypothesis import HealthCheck, settings

    # A forked child deadlocks in an OpenMP pool that its parent has started.
    torch.set_num_threads(1)
    # The same examples in every run. Machines are busy: how long one takes says nothing.
    settings.register_profile(
        "namedmesh", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("namedmesh")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Look for garbage once; pytest and the interpreter's exit do so six times, among everything that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _as_if_alone() -> Iterator[None]:
    """Begin with the same random numbers whatever ran before in this process, and leave no group behind."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a default process group behind")


@pytest.fixture(autouse=True, scope="module")
def _no_original_left_behind() -> Iterator[None]:
    """Later tests and doctests start as a program does, before the first import of what a dialect replaces."""
    import megatron_newest

    yield
    megatron_newest.forget()


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    """Set what differs on CUDA and can be set on a CPU; forked ranks inherit it."""
    from as_cuda import as_cuda

    with as_cuda():
        yield


def installed(package: str) -> bool:
    """Whether a package, or a module inside one, can be imported; nothing of it is loaded to find out."""
    import megatron_newest

    if package == megatron_newest.NEWEST:
        return megatron_newest.available()
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here, and say so; with ORACLES=required a missing package fails instead."""
    import megatron_newest
    import torch

    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for item in items:
        for mark in item.iter_markers("oracle"):
            # Published packages warn as they please, while they are imported and later.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            missing = [package for package in mark.args if not installed(package)]
            if missing and os.environ.get("ORACLES") == "required":
                raise pytest.UsageError(
                    f"{item.nodeid} needs {', '.join(missing)}: install the extra 'oracles'; {megatron_newest.NEWEST} "
                    "is the directory of an unpacked wheel"
                )
            if missing:
                reason = f"needs {', '.join(missing)} (extra 'oracles')"
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
