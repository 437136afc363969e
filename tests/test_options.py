"""Options of groups: what they accept, how they combine, and how they reach torch."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from messages import says
from ranks import fake_world

import namedmesh
from namedmesh import GroupOptions, LayoutError
from namedmesh.groups import nccl_options


def test_options_that_reach_a_group_over_two_axes() -> None:
    with fake_world(8):
        options = {
            "dp": GroupOptions(timeout=timedelta(seconds=3), nccl={"max_ctas": 4}),
            "cp": GroupOptions(high_priority=True),
            "cp_tp": GroupOptions(timeout=timedelta(seconds=9)),
        }
        mesh = namedmesh.init_mesh(dp=2, cp=2, tp=2, options=options)
        assert mesh.options_of(("dp", "cp")) == GroupOptions(
            timeout=timedelta(seconds=3), nccl={"max_ctas": 4}, high_priority=True
        )
        assert mesh.options_of(("cp", "tp")) == GroupOptions(timeout=timedelta(seconds=9))
        mesh.close()


@pytest.mark.gpu
def test_nccl_settings_reach_the_communicator() -> None:
    options = GroupOptions(nccl={"max_ctas": 4}, high_priority=True)
    made: Any = nccl_options(replace(options, timeout=timedelta(seconds=7)))
    assert (made.config.max_ctas, made.is_high_priority_stream) == (4, True)
    assert made._timeout == timedelta(seconds=7)
    assert torch.cuda.is_available()


MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"backend": 7, "timeout": timedelta(0)},
        "2 problems:\n"
        "  - backend is 7; it is a name such as 'gloo'\n"
        "  - timeout is datetime.timedelta(0); it is a datetime.timedelta longer than nothing",
    ),
    ({"timeout": 30}, "timeout is 30; it is a datetime.timedelta longer than nothing"),
]


@pytest.mark.parametrize(("arguments", "text"), MESSAGES)
def test_messages(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=says(text)):
        GroupOptions(**arguments)


def test_spelling_makes_no_other_group() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=2, tp=4, backend="FAKE", options={"tp": GroupOptions(backend="fake")})
        same = namedmesh.init_mesh(dp=2, tp=4)
        assert (same.group("tp"), same.group("dp")) == (mesh.group("tp"), mesh.group("dp"))
        mesh.close()
        same.close()
