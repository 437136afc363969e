"""The elastic example, with agents as torchrun's: one host of two is lost, and the other one ends the job."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import free_port, run_ranks
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import GELU, Linear, Sequential

from namedmesh import training

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
STEPS = 6


def _train(directory: Path, step_of_loss: int | None = None) -> None:
    """Run the example on one rank; the host of the rank is lost when a step is saved, if one is given."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own, not the agent's handler
    save = training.CheckpointManager.save

    def save_and_lose_host(self: training.CheckpointManager, step: int, *args: Any, **options: Any) -> Any:
        saved = save(self, step, *args, **options)
        if step == step_of_loss:
            os.kill(os.getppid(), signal.SIGKILL)  # the agent
            os.kill(os.getpid(), signal.SIGKILL)
        return saved

    sys.argv = [str(EXAMPLE), str(directory / "checkpoints"), str(STEPS)]
    with (
        (directory / "printed").open("a", encoding="utf-8") as out,
        redirect_stdout(out),
        mock.patch.object(training.CheckpointManager, "save", save_and_lose_host),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def _launch(directory: Path, port: int, *, is_lost: bool) -> None:
    """Do what torchrun does on one host: ``--nnodes 1:2 --max-restarts 1``, with a forked worker."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        del os.environ[name]
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
        run_id="elastic",
        local_addr="127.0.0.1",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={
            "is_host": not is_lost,  # without this host there is no rendezvous
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 3,
            "last_call_timeout": 3,
        },
    )
    elastic_launch(settings, _train)(directory, 3 if is_lost else None)


def _run_host(directory: Path, port: int) -> int | None:
    """Run the agent of a host in a process of its own, and return its exit status."""
    lost = os.environ["RANK"] == "1"
    agent = multiprocessing.get_context("fork").Process(
        target=_launch, args=(directory, port), kwargs={"is_lost": lost}
    )
    agent.start()
    agent.join()
    return agent.exitcode


def _results(directory: Path) -> tuple[list[tuple[str, str, float]], torch.Tensor]:
    """Return step, layout and loss of each line that was printed, and the weights of the last checkpoint."""
    lines = re.findall(
        r"step (\d+) in (\S+) .* loss (\S+)", (directory / "printed").read_text(encoding="utf-8")
    )
    model = Sequential(Linear(16, 64), GELU(), Linear(64, 16))
    training.load(directory / "checkpoints" / f"step-{STEPS:06}", None, model)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return [(step, layout, float(loss)) for step, layout, loss in lines], weights


def test_a_job_that_loses_a_host_ends_on_the_other_one_as_if_nothing_had_happened(tmp_path: Path) -> None:
    hosts, alone = tmp_path / "hosts", tmp_path / "alone"
    hosts.mkdir()
    alone.mkdir()
    assert run_ranks(2, _run_host, hosts, free_port(), init=False) == [0, -signal.SIGKILL]
    run_ranks(1, _train, alone, init=False)
    found, weights = _results(hosts)
    expected, expected_weights = _results(alone)
    assert [(step, layout) for step, layout, _ in found] == [
        (str(step), "dp=2" if step < 3 else "dp=1") for step in range(STEPS)
    ]
    assert [loss for _, _, loss in found] == pytest.approx([loss for _, _, loss in expected], abs=2e-4)
    assert torch.allclose(weights, expected_weights, atol=1e-5)
