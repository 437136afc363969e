"""``Throughput`` divides tokens by seconds, and operations by those of all devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from ranks import fake_world

import namedmesh
from namedmesh.training import Throughput


def test_a_line_has_tokens_memory_and_utilization() -> None:
    with fake_world(4):
        mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
        with mock.patch("time.monotonic", side_effect=[10.0, 12.0, 12.0, 12.5, 12.5]):
            throughput = Throughput(mesh, flops_per_token=6e3, peak_flops=1e6)
            throughput.update(700)  # the first step, which is not counted
            assert throughput.summary() == ""
            throughput.update(1000)
            throughput.update(1000)
            assert throughput.summary() == "1,000 tokens/s, 150.0% utilization"
            throughput.update(1000)
            assert throughput.summary() == "2,000 tokens/s, 300.0% utilization"
        mesh.close()


def test_memory_of_an_accelerator() -> None:
    device: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    with fake_world(1):
        mesh = namedmesh.init_mesh(dp=1, device="cpu")
        throughput = Throughput(mesh)
        throughput.update(1)
        throughput.update(1)
        throughput.mesh = device
        with (
            mock.patch.object(torch.accelerator, "max_memory_allocated", return_value=3 * 2**29),
            mock.patch.object(torch.accelerator, "get_memory_info", return_value=(1, 2**32)),
        ):
            assert throughput.summary().endswith("tokens/s, 1.50 GiB (38%)")
        mesh.close()
