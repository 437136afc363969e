"""A gloo group of ours reads what torch's own reads: interfaces, transport, timeout, debug level."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, summed

import namedmesh
from namedmesh import GroupOptions

TIMEOUT = timedelta(seconds=33)


def _described(group: dist.ProcessGroup) -> dict[str, Any]:
    """What can be seen of a group's construction."""
    backend: Any = group._get_backend(torch.device("cpu"))
    options = getattr(backend, "wrapped_pg", backend).options
    return {
        "backend": type(backend).__name__,
        "name": backend.name(),
        "interfaces": len(options._devices),
        "threads": options._threads,
        "timeout": options._timeout,
        "ranks": list(options.global_ranks_in_group),
        "sum": summed(group),
    }


def _both(variables: dict[str, str]) -> list[object]:
    """Two groups over the same ranks in the same environment: torch's, and ours."""
    os.environ.update(variables)
    dist.set_debug_level_from_env()
    found: list[object] = []
    for make in (
        lambda: dist.new_group([0, 1], timeout=TIMEOUT),
        lambda: namedmesh.init_mesh(all=2, options={"all": GroupOptions(timeout=TIMEOUT)}).group("all"),
    ):
        try:
            found.append(_described(make()))
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    return found


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "nothing": {},
    "an interface": {"GLOO_SOCKET_IFNAME": "lo"},
    "two interfaces": {"GLOO_SOCKET_IFNAME": "lo,lo"},
    "a name that does not exist": {"GLOO_SOCKET_IFNAME": "doesnotexist0"},
    "a single letter": {"GLOO_SOCKET_IFNAME": "x"},
    "a transport": {"GLOO_DEVICE_TRANSPORT": "TCP"},
    "an unknown transport": {"GLOO_DEVICE_TRANSPORT": "PIGEON"},
    "lazy": {"TORCH_GLOO_LAZY_INIT": "1"},
    "not lazy": {"TORCH_GLOO_LAZY_INIT": "0"},
    "debugging": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_ours_is_constructed_as_torchs_is(name: str) -> None:
    for torchs, ours in run_ranks(2, _both, ENVIRONMENTS[name]):
        assert ours == torchs
