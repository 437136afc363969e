"""``README.md``: its code runs as it is, prints what is shown, and its statements on other libraries are true."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train
from messages import capture_printed, error_of
from pages import ROOT, blocks
from ranks import fake_world, live_groups, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import NamedMesh
from namedmesh.launch.tested_releases import TESTED_RELEASES

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_without_a_launcher_an_error_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    text = (
        "No launcher has started this process, so it is a single-process run; start 8 processes with: torchrun "
        "--nproc-per-node 8 SCRIPT"
    )
    told = error_of(lambda: namedmesh.init_mesh(dp=-1, tp=2, device="cpu"))
    assert told.startswith("LayoutError: ")
    assert told.endswith(text)


@pytest.mark.ci
def test_the_shown_training_is_the_real_one(tmp_path: Path) -> None:
    small = "--pp 2 --tp 2 --steps 1 --batch 4 --seq 16 --dim 32 --device cpu"
    words = f"{small} --data {ROOT / 'examples'} --checkpoint {tmp_path}".split()
    results = run_ranks(8, lambda: capture_printed(lambda: train.main(words))[:2], init=False)
    told = results[0][1]
    assert results == [(0, told)] + [(0, "")] * 7
    layout, first, last = blocks(README, "text", "output: train")[0].split("...\n")
    assert layout in told
    pattern = r"^step 1/\d+  loss (\d\.\d+) nats a byte$"
    (real,) = re.findall(pattern, told, flags=re.MULTILINE)
    (shown,) = re.findall(pattern, first, flags=re.MULTILINE)
    assert float(real) == pytest.approx(float(shown), abs=0.2)  # of another text
    continuing = last[last.index("to continue") :]
    assert continuing.replace("checkpoints", str(tmp_path)) in told


SECTIONS = [
    "What it does",
    "Install",
    "Quickstart",
    "Core concepts",
    "Features",
    "Your existing code",
    "Two commands",
    "When to use something else",
    "Compatibility and limits",
    "The guide",
]


def find_section(title: str) -> str:
    """Return the text of a section of the README."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_it_is_short_and_its_sections_are_in_order() -> None:
    assert len(README.splitlines()) <= 150
    assert re.findall(r"^## (.+)$", README, flags=re.MULTILINE) == SECTIONS
    assert len(re.findall(r"^- ", find_section("What it does"), flags=re.MULTILINE)) == 5
    (example,) = blocks(README, "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_it_has_two_commands_that_are_marked() -> None:
    for name in ("train", "test"):
        (command,) = blocks(README, "bash", f"command: {name}")
        assert command.count("\n") == 1
        assert command in find_section("Two commands")
    assert len(blocks(README, "bash")) == 3


def test_the_tested_releases_are_the_real_ones() -> None:
    table = find_section("Compatibility and limits")
    torch_releases = TESTED_RELEASES["torch"]
    assert f"| torch | {torch_releases.oldest} to {torch_releases.newest} |" in table
    upstream = [str(releases) for name, releases in TESTED_RELEASES.items() if name != "torch"]
    assert f"| upstream | {', '.join(upstream)} |" in table
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f"| {pythons[0]} to {pythons[-1]} |" in table
    assert f"Python {pythons[0]} or newer, {torch_releases}, " in find_section("Install")
    quickstart = (ROOT / "examples/guide/quickstart.md").read_text(encoding="utf-8")
    assert f"Python {pythons[0]} or newer, and {torch_releases}." in quickstart


def test_every_feature_and_every_kind_of_existing_code_has_a_page() -> None:
    for title, folders in (("Features", "guide"), ("Your existing code", "migrate|integrations")):
        rows = [row for row in find_section(title).splitlines() if row.startswith("|")][2:]
        for row in rows:
            assert re.search(rf"\]\(examples/({folders})/\w+\.md", row), row


# --- what the README and the pages say of other libraries ------------------------------------------------------


def _reduced_over_replicas() -> list[float]:
    """A replica of two ranks; what the other replicas have comes in by the hook, as torchft's groups do it."""
    mesh = namedmesh.init_mesh(dp_shard=2, device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp_shard"])
    gradients: list[torch.Tensor] = []
    sharded: Any = model
    sharded.set_all_reduce_hook(lambda reduced: gradients.append(reduced.mul_(0.5).clone()))
    model(torch.ones(2, 4)).sum().backward()
    weight: Any = model.weight
    whole = weight.grad.full_tensor()
    mesh.close()
    return [float(len(gradients)), *whole.unique().tolist()]


def test_a_hook_reduces_over_replicas_that_are_in_no_mesh() -> None:
    # The gradient is 2, of which the hook keeps half.
    assert run_ranks(2, _reduced_over_replicas) == [[1.0, 1.0]] * 2


def test_a_group_that_torch_does_not_know_is_refused() -> None:
    class Managed(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 2)  # type: ignore[call-arg]  # the other constructor

        def size(self) -> int:
            return 2

    with fake_world(4):
        mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
        groups = {"dp_replicate": Managed(), "tp": mesh.group("tp")}
        assert error_of(lambda: NamedMesh.from_groups(groups, device="cpu")) == (
            "LayoutError: the group of axis 'dp_replicate' is a Managed that is not registered in torch.distributed, so "
            "its ranks are not known; omit the axis"
        )
        mesh.close()


def made_twice(make: Callable[[], object]) -> tuple[int, int]:
    """How many more groups there are after a first call, and how many after a second one."""
    counts, kept = [live_groups()], []
    for _ in range(2):
        kept.append(make())
        counts.append(live_groups())
    return counts[1] - counts[0], counts[2] - counts[1]


def test_torch_makes_groups_again_and_takes_a_part_of_the_world() -> None:
    with fake_world(16):
        assert made_twice(lambda: init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))) == (2, 2)
        assert made_twice(lambda: namedmesh.init_mesh(dp=8, tp=2, device="cpu")) == (2, 0)
        assert init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).size() == 4
        with pytest.raises(RuntimeError):
            init_device_mesh("cpu", (-1, 2), mesh_dim_names=("dp", "tp"))
    assert "may lead to hanging" in (init_device_mesh.__doc__ or "")


@pytest.mark.oracle("megatron.core", "accelerate")
def test_megatron_leaves_groups_and_accelerate_has_five_axes() -> None:
    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")

    def initialize_and_destroy() -> None:
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        parallel_state.destroy_model_parallel()

    assert all(more > 0 for found in run_ranks(4, made_twice, initialize_and_destroy) for more in found)
    configuration: Any = importlib.import_module("accelerate").ParallelismConfig
    sizes = {field.name for field in fields(configuration) if field.name.endswith("_size")}
    assert sizes == {"dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size"}
