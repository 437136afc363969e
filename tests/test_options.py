"""Options of groups: what they accept, how they combine, and Megatron's file format."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from messages import says
from ranks import fake_world

import namedmesh
from namedmesh import GroupOptions, LayoutError
from namedmesh.options import nccl_options, normalized_backend

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
tp:
  max_ctas: 32
  min_ctas: 8
  is_high_priority_stream: true
dp_cp:
  cga_cluster_size: 2
  net_name: IB
"""


def test_the_file_of_megatron_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(FILE, encoding="utf-8")
    assert GroupOptions.from_yaml(path) == {
        "tp": GroupOptions(nccl={"max_ctas": 32, "min_ctas": 8}, high_priority=True),
        "dp_cp": GroupOptions(nccl={"cga_cluster_size": 2, "net_name": "IB"}),
    }


@pytest.mark.oracle("megatron.core")
def test_the_file_is_the_one_that_megatron_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron turns the same file into NCCL options; ours must come to the same settings."""
    import yaml
    from megatron.core import parallel_state

    class Options:
        """Stands for torch's, which a build without NCCL does not have."""

        def __init__(self, *, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = type("Config", (), {})()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
    path = tmp_path / "nccl.yaml"
    path.write_text(FILE, encoding="utf-8")
    theirs = parallel_state.get_nccl_options("tp", yaml.safe_load(FILE))
    ours: Any = nccl_options(GroupOptions.from_yaml(path)["tp"], timedelta(seconds=1))
    assert ours.is_high_priority_stream == theirs.is_high_priority_stream is True
    for name in ("max_ctas", "min_ctas"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)


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
    made: Any = nccl_options(options, timedelta(seconds=7))
    assert (made.config.max_ctas, made.is_high_priority_stream) == (4, True)
    assert made._timeout == timedelta(seconds=7)
    assert torch.cuda.is_available()


def backends_of_torch(name: str | None) -> dict[str, str]:
    """What torch itself makes of the name of a backend."""
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    # Like init_process_group, which gives every name to Backend first.
    config = BackendConfig(Backend(name or "undefined"))
    return {kind: str(backend) for kind, backend in config.get_device_backend_map().items()}


NAMES = ("nccl", "NCCL", "gloo", "Gloo", "fake", "mpi", "xccl", "cpu:gloo,cuda:nccl", "CUDA:NCCL,cpu:GLOO")


@pytest.mark.parametrize("name", [None, "undefined", "UNDEFINED", *NAMES])
def test_backends_are_read_as_torch_reads_them(name: str | None) -> None:
    assert normalized_backend(name) == backends_of_torch(name)


def test_backends_do_not_depend_on_spelling() -> None:
    assert str(normalized_backend("CUDA:NCCL,cpu:gloo")) == str(normalized_backend("cpu:gloo,cuda:nccl"))
    assert str(normalized_backend("NCCL")) == str(normalized_backend("nccl"))
    assert [
        normalized_backend(name).get("cuda") == "nccl" for name in ("NCCL", "cpu:gloo,cuda:nccl", "gloo")
    ] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "cpu"])
def test_without_a_name_the_accelerator_decides(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    found = None if kind == "cpu" else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    assert normalized_backend(None) == {kind: dist.Backend.default_device_backend_map[kind]}


def test_without_a_device_a_build_for_one_is_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    assert normalized_backend(None) == {"cpu": "gloo"}


# Tests before this one may have registered backends.
WRONG_BACKENDS: list[tuple[str, str]] = [
    (
        "ncll",
        "backend 'ncll' names 'ncll', which is none that torch knows; the backends are <known>, or one for each type of "
        "device such as 'cpu:gloo,cuda:nccl'; did you mean 'nccl'?",
    ),
    ("cpu:,cuda:nccl", "backend 'cpu:,cuda:nccl' names '', ... such as 'cpu:gloo,cuda:nccl'"),
    ("cpu:gloo,CPU:mpi", "backend 'cpu:gloo,CPU:mpi' names device type 'cpu' 2 times; name each one once"),
]


@pytest.mark.parametrize(("name", "text"), WRONG_BACKENDS)
def test_wrong_backends_are_refused(name: str, text: str) -> None:
    known = ", ".join(name for name in dist.Backend.backend_list if name != "undefined")
    with pytest.raises(LayoutError, match=says(text.replace("<known>", known))):
        normalized_backend(name)


MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"nccl": 3, "backend": 7},
        "2 problems:\n"
        "  - nccl is 3; it maps settings to values, as in {'max_ctas': 32}\n"
        "  - backend is 7; it is a name such as 'gloo'",
    ),
    (
        {"nccl": {"max_cta": 4}},
        "NCCL has no setting 'max_cta' that a group can give; the settings are blocking, cga_cluster_size, "
        "collnet_enable, cta_policy, max_ctas, min_ctas, net_name, nvls_ctas, split_share, traffic_class; did you "
        "mean 'max_ctas'?",
    ),
    ({"timeout": 30}, "timeout is 30; it is a datetime.timedelta longer than nothing and of at most a year"),
    ({"timeout": timedelta(0)}, "timeout is datetime.timedelta(0); ..."),
]


@pytest.mark.parametrize(("arguments", "text"), MESSAGES)
def test_messages(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=says(text)):
        GroupOptions(**arguments)


FILES: list[tuple[str | None, str]] = [
    (None, "the options file 'nccl.yaml' cannot be read: No such file or directory"),
    (
        "1: {max_ctas: 1}\n",
        "the options file 'nccl.yaml' must map names of axes to settings, such as 'tp: {max_ctas: 32}'",
    ),
    ("- tp\n", "the options file 'nccl.yaml' must map ..."),
    (
        "tp: {maxctas: 1}\ndp: {min_cats: 1}\n",
        "2 problems:\n"
        "  - nccl.yaml, tp: NCCL has no setting 'maxctas' ...; did you mean 'max_ctas'?\n"
        "  - nccl.yaml, dp: NCCL has no setting 'min_cats' ...; did you mean 'min_ctas'?",
    ),
]


@pytest.mark.parametrize(("content", "text"), FILES)
def test_messages_about_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "nccl.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(LayoutError, match=says(text)):
        GroupOptions.from_yaml("nccl.yaml")
