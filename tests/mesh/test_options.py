"""GroupOptions: validation, merging, and the arguments that torch gets."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import error_of, match_message
from ranks import fake_world, run_ranks, summed

import namedmesh
from namedmesh import GroupOptions, OptionError
from namedmesh.mesh.internal import get_groups
from namedmesh.mesh.options import make_group_arguments, make_nccl_options


def test_options_of_a_group_over_two_axes_are_merged() -> None:
    with fake_world(8):
        options = {
            "dp": GroupOptions(timeout=timedelta(seconds=3), nccl={"max_ctas": 4}),
            "cp": GroupOptions(high_priority=True),
            "cp_tp": GroupOptions(timeout=timedelta(seconds=9)),
        }
        mesh = namedmesh.init_mesh(dp=2, cp=2, tp=2, options=options)
        assert get_groups(mesh).get_options(("dp", "cp")) == GroupOptions(
            timeout=timedelta(seconds=3), nccl={"max_ctas": 4}, high_priority=True
        )
        assert get_groups(mesh).get_options(("cp", "tp")) == GroupOptions(timeout=timedelta(seconds=9))
        mesh.close()


def _init_without_backend() -> list[str]:
    """As in torch's tutorials. get_backend() then returns "undefined"."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    rank = int(os.environ["RANK"])
    dist.init_process_group(store=store, rank=rank, world_size=4)
    nccl_options = GroupOptions(nccl={"max_ctas": 4}, high_priority=True)
    errors = [error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, device="cpu", options={"tp": nccl_options}))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl")
        errors.append(error_of(lambda: make_group_arguments(nccl_options)))
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
    assert summed(mesh.group("tp"), rank) == 2 * (rank - rank % 2) + 1
    return errors


@pytest.mark.skipif(dist.is_nccl_available(), reason="the backend that torch chooses is NCCL")
def test_nccl_settings_are_rejected_if_torch_chose_another_backend() -> None:
    expected = [
        "OptionError: nccl={'max_ctas': 4} and high_priority=True are settings of NCCL, but the groups use the "
        "backend 'cpu:gloo'; omit them, or choose a backend with NCCL, such as backend='nccl'",
        "MeshError: this torch was built without NCCL, so there are no NCCL options; use another backend",
    ]
    assert run_ranks(4, _init_without_backend, init=False) == [expected] * 4


@pytest.mark.gpu
def test_nccl_settings_reach_the_communicator() -> None:
    options = GroupOptions(nccl={"max_ctas": 4}, high_priority=True)
    made: Any = make_nccl_options(replace(options, timeout=timedelta(seconds=7)))
    assert (made.config.max_ctas, made.is_high_priority_stream) == (4, True)
    assert made._timeout == timedelta(seconds=7)
    assert torch.cuda.is_available()


MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"backend": 7, "timeout": timedelta(0)},
        "2 problems:\n"
        "  - backend must be a name such as 'gloo', got 7\n"
        "  - timeout must be a positive datetime.timedelta, got datetime.timedelta(0)",
    ),
    ({"timeout": 30}, "timeout must be a positive datetime.timedelta, got 30"),
    ({"nccl": 4}, "nccl must be a mapping of names to values, got 4"),
]


@pytest.mark.parametrize(("arguments", "text"), MESSAGES)
def test_messages(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=match_message(text)):
        GroupOptions(**arguments)


def test_the_spelling_of_a_backend_does_not_create_another_group() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=2, tp=4, backend="FAKE", options={"tp": GroupOptions(backend="fake")})
        same = namedmesh.init_mesh(dp=2, tp=4)
        assert (same.group("tp"), same.group("dp")) == (mesh.group("tp"), mesh.group("dp"))
        mesh.close()
        same.close()
