"""What every test starts from: one thread a process, and no process group left behind."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

# A forked child deadlocks in an OpenMP pool that its parent has started.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_group_left_behind() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a default process group behind")
