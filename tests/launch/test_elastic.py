"""The elastic example, with agents as torchrun's: a host is lost, or joins, and the job goes on."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import free_port, run_ranks
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import GELU, Linear, Sequential

from namedmesh import training

pytestmark = pytest.mark.ci

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
STEPS, STEP_OF_EVENT = 6, 3


def _lose_host(_: Path) -> None:
    """End this rank and its agent, as the loss of their host does."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_host(directory: Path) -> None:
    """Let the other host join, and wait for the signal by which the agent ends this rank."""
    (directory / "joins").touch()
    signal.pause()


def _train(directory: Path, event: Callable[[Path], None] | None = None) -> None:
    """Run the example on one rank; something may happen when the first attempt has saved step 3."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own, not the agent's handler
    save = training.CheckpointManager.save

    def save_and_let_happen(self: training.CheckpointManager, step: int, *args: Any, **options: Any) -> Any:
        saved = save(self, step, *args, **options)
        if step == STEP_OF_EVENT and event is not None:
            event(directory)
        return saved

    sys.argv = [str(EXAMPLE), str(directory / "checkpoints"), str(STEPS)]
    with (
        (directory / "printed").open("a", encoding="utf-8") as out,
        redirect_stdout(out),
        mock.patch.object(training.CheckpointManager, "save", save_and_let_happen),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def _launch(
    directory: Path, port: int, event: Callable[[Path], None] | None, *, is_first: bool, joins: bool
) -> None:
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
            "is_host": is_first,  # without this host there is no rendezvous
            "keep_alive_interval": 1,
            # After these seconds without a sign a host counts as lost. Where none is, a busy machine must not look like it.
            "keep_alive_max_attempt": 60 if joins else 5,
            "last_call_timeout": 10,  # both hosts start, also on a busy machine
        },
    )
    elastic_launch(settings, _train)(directory, event)


def _run_host(directory: Path, port: int, *, joins: bool) -> int | None:
    """Run the agent of a host in a process of its own, and return its exit status."""
    is_first = os.environ["RANK"] == "0"
    event: Callable[[Path], None] | None = None
    if joins and is_first:
        event = _wait_for_host
    elif not joins and not is_first:
        event = _lose_host
    if joins:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see the page
        while not is_first and not (directory / "joins").exists():
            time.sleep(0.02)
    agent = multiprocessing.get_context("fork").Process(
        target=_launch, args=(directory, port, event), kwargs={"is_first": is_first, "joins": joins}
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


@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_that_loses_or_gets_a_host_ends_as_if_nothing_had_happened(
    tmp_path: Path, *, joins: bool
) -> None:
    hosts, alone = tmp_path / "hosts", tmp_path / "alone"
    hosts.mkdir()
    alone.mkdir()
    run_ranks(1, _train, alone, init=False)
    # Between the attempts the agents wait for many seconds.
    statuses = run_ranks(2, partial(_run_host, joins=joins), hosts, free_port(), init=False, timeout=240)
    assert statuses == [0, 0 if joins else -signal.SIGKILL]
    found, weights = _results(hosts)
    expected, expected_weights = _results(alone)
    before, after = ("dp=1", "dp=2") if joins else ("dp=2", "dp=1")
    layouts = [before] * STEP_OF_EVENT + [after] * (STEPS - STEP_OF_EVENT)
    assert [(int(step), layout) for step, layout, _ in found] == list(enumerate(layouts))
    assert [loss for _, _, loss in found] == pytest.approx([loss for _, _, loss in expected], abs=2e-4)
    assert torch.allclose(weights, expected_weights, atol=1e-5)
