"""The training script: every layout gives the losses of one process, and checkpoints fit all of them."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import train
from parallel import make_mesh
from ranks import run_ranks
from tiny import AdamWOfShards
from torch._dynamo.testing import CompileCounterWithBackend
from train import Settings, new_model, read_text, reference_losses, rotate

pytestmark = pytest.mark.ci

EXAMPLES = Path(train.__file__).parent
# verify=True makes everything double precision, so that only real differences are seen.
TINY = Settings(
    steps=4,
    batch=8,
    seq=16,
    dim=32,
    layers=2,
    data=str(EXAMPLES / "plan"),  # a directory that no test writes to
    lr=0.08,  # so that four steps are enough to learn something
    clip=0.1,  # below the norms that come up, so that clipping counts
    verify=True,
    device="cpu",
)


def losses_of(settings: Settings, optimizer: type[torch.optim.AdamW] = torch.optim.AdamW) -> list[float]:
    mesh = make_mesh(settings)
    with mock.patch("torch.optim.AdamW", optimizer):
        losses = train.train(settings, read_text(settings.data), mesh)
    mesh.close()
    return losses


def one_process(settings: Settings) -> list[float]:
    return reference_losses(settings, read_text(settings.data), torch.device("cpu"))


@pytest.fixture(scope="module")
def reference() -> list[float]:
    # In a process of its own: one that has run a backward has threads, and should not be forked any more.
    return run_ranks(1, one_process, TINY)[0]


def losses_of_each(settings: list[Settings]) -> list[list[float]]:
    """The losses on one layout after the other; on DTensors torch's own optimizer works on the first."""
    first, *others = settings
    return [losses_of(first), *(losses_of(each, AdamWOfShards) for each in others)]


def assert_losses(settings: Settings, expected: list[float], ranks: int, *layouts: dict[str, Any]) -> None:
    """Each layout has the losses that are expected, on every rank."""
    of_layouts = [replace(settings, **layout) for layout in layouts]
    for found in run_ranks(ranks, losses_of_each, of_layouts, timeout=180.0):
        for losses in found:
            assert losses == pytest.approx(expected, abs=1e-9)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (4, [{"cp": 2, "tp": 2, "microbatches": 2}]),
        pytest.param(4, [{"tp": 2, "microbatches": 2}, {"cp": 2, "microbatches": 2}], marks=pytest.mark.slow),
        pytest.param(8, [{"pp": 2, "cp": 2, "tp": 2}], marks=pytest.mark.slow),
        pytest.param(8, [{"pp": 2, "tp": 2, "microbatches": 4}], marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(
    ranks: int, layouts: list[dict[str, Any]], reference: list[float]
) -> None:
    assert reference[-1] < reference[0] - 0.01
    assert_losses(TINY, reference, ranks, *layouts)


@pytest.mark.parametrize("tp_sizes", [(2,), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_in_other_layouts(
    tp_sizes: tuple[int, ...], tmp_path: Path, reference: list[float]
) -> None:
    first = replace(TINY, checkpoint=str(tmp_path / "first"), save_every=2, evaluate_every=1)
    assert_losses(first, reference, 4, {"pp": 2, "tp": 2})
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["step-000002", "step-000004"]
    for tp in tp_sizes:
        where = tmp_path / str(tp)
        shutil.copytree(tmp_path / "first" / "step-000002", where / "step-000002")
        assert_losses(replace(TINY, checkpoint=str(where)), reference[2:], tp, {"tp": tp})


def interrupted(settings: Settings) -> list[list[float]]:
    """A job that one rank's signal ends in its second step, and that is queued again, twice, with the same command line."""

    def draw(text: torch.Tensor, settings: Settings, step: int, rows: slice) -> Any:
        if step == 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_draw(text, settings, step, rows)

    train_draw = train.draw_batch
    with mock.patch("train.draw_batch", draw), pytest.raises(SystemExit) as ended:
        losses_of(settings)
    assert ended.value.code == 130
    return [losses_of(settings), losses_of(settings)]


def test_a_job_that_is_queued_again_goes_on(tmp_path: Path, reference: list[float]) -> None:
    settings = replace(TINY, tp=2, recompute=True, checkpoint=str(tmp_path))
    for again, nothing_left in run_ranks(2, interrupted, settings):
        assert again == pytest.approx(reference[2:], abs=1e-9)
        assert nothing_left == []


def compiled() -> tuple[list[float], int]:
    """The losses with layers that are compiled without a break, and how many graphs that made."""
    warnings.simplefilter("ignore")  # the compiler warns about what torch itself does
    counter = CompileCounterWithBackend("eager")
    settings = replace(TINY, tp=2, recompute=True, compile=True)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True)):
        return losses_of(settings, AdamWOfShards), counter.frame_count


@pytest.mark.slow
def test_losses_with_compiled_layers_are_those_of_one_process(reference: list[float]) -> None:
    for losses, graphs in run_ranks(2, compiled):
        assert losses == pytest.approx(reference, abs=1e-9)
        assert graphs >= 1


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, {"tp": 2, "ep": 2, "etp": 2}),
        pytest.param(8, {"pp": 2, "cp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
)
def test_losses_with_experts_are_those_of_one_process(ranks: int, layout: dict[str, Any]) -> None:
    settings = replace(TINY, moe=True, steps=2)
    expected = run_ranks(1, one_process, settings)[0]
    assert_losses(settings, expected, ranks, layout)


def status(words: str, off: float = 0.0) -> object:
    """The exit status of the script, where one process gives losses that are off by something."""

    def reference(*arguments: Any) -> list[float]:
        return [loss + off for loss in reference_losses(*arguments)]

    small = f"--device cpu --data {EXAMPLES / 'plan'} --steps 1 --dim 32 --seq 16 "
    with mock.patch("train.reference_losses", reference):
        try:
            return train.main((small + words).split())
        except SystemExit as ended:
            return ended.code


REFUSED = {
    "--batch 3": "--batch 3 is not divisible by dp=2",
    "--ep 2": "--ep and --etp are for experts; give --moe, too",
    "--pp 2 --layers 1": "cannot split 1 layers into 2 stages; each stage needs at least one layer",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_job_that_does_not_fit_is_refused_once(words: str) -> None:
    assert run_ranks(2, status, words, init=False) == [f"cannot train: {REFUSED[words]}", 0]


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_the_status_says_whether_losses_agree(off: float) -> None:
    assert run_ranks(2, status, "--tp 2 --verify", off, init=False) == [int(off > 0), 0]


def test_windows_cross_files_and_ranks_share_a_batch(tmp_path: Path) -> None:
    assert len(read_text(Settings().data)) > 1_000_000  # if no other text is asked for
    for name, words in (("a", "abc"), ("b", ""), ("c", "defgh"), ("d", "i")):
        (tmp_path / name).write_text(words)
    text = read_text(str(tmp_path))
    assert len(text) == 9
    settings = Settings(batch=16, seq=5)
    inputs, targets = train.draw_batch(text, settings, 0)
    assert inputs.shape == targets.shape == (16, 5)
    windows = {bytes(window.tolist()) for window in inputs}
    assert windows == {b"abcde", b"bcdef", b"cdefg", b"defgh"}
    assert torch.equal(targets, inputs + 1)
    halves = [train.draw_batch(text, settings, 0, slice(rank, None, 2))[0] for rank in range(2)]
    assert torch.equal(torch.stack(halves, 1).flatten(0, 1), inputs)
    assert not torch.equal(train.draw_batch(text, settings, 1)[0], inputs)


def test_positions_see_only_what_is_before_them() -> None:
    model, positions = new_model(Settings(dim=16, layers=2)), torch.arange(8)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    differs = (model(tokens, positions) != model(changed, positions)).any(dim=-1)[0].tolist()
    assert differs == [False] * 5 + [True] * 3


def test_rotary_scores_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6)
    scores = rotate(query.expand(6, 8), positions) @ rotate(key.expand(6, 8), positions).T
    for distance in range(-5, 6):
        along = scores.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-5)
    assert scores[0, 0] == pytest.approx(float(query @ key))
    assert (scores[0, 1:] - scores[0, 0]).abs().min() > 1e-3
