from __future__ import annotations
import os, time
from datetime import timedelta
from typing import TYPE_CHECKING
import pytest, torch
import torch.distributed as dist
import two_hosts
from ranks import summed
import namedmesh


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    yield from two_hosts.make(tmp_path_factory.mktemp("hosts"))


def _mesh():
    import socket

    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu", timeout=timedelta(seconds=10))
    out = [socket.gethostname(), summed(mesh.group("dp")), summed(mesh.group("tp"))]
    mesh.close()
    dist.barrier()
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize("loop", [False, True])
def test_mesh(hosts, loop):
    print(hosts.run(2, _mesh, loopback_names=loop))
