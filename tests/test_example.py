"""The training script: every layout gives the losses of one process, and checkpoints fit all of them."""

from __future__ import annotations

import dataclasses
import os
import runpy
import shutil
import signal
import sys
import warnings
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import train
from parallel import make_mesh, picture
from ranks import run_ranks
from tiny import AdamWOfShards
from torch._dynamo.testing import CompileCounterWithBackend
from train import Settings, new_model, parse, read_text, reference_losses, rotate

import namedmesh
from namedmesh.training import stage_layers

EXAMPLES = Path(train.__file__).parent
# verify=True makes everything double precision, so that only real differences are seen.
TINY = Settings(
    steps=4,
    batch=8,
    seq=16,
    dim=32,
    layers=4,
    heads=8,
    kv_heads=8,
    data=str(EXAMPLES / "train.py"),  # not the directory: other tests compile its scripts meanwhile
    checkpoint="",
    lr=0.08,  # so that four steps are enough to learn something
    clip=0.1,  # below the norms that come up, so that clipping counts
    verify=True,
    device="cpu",
)


def losses_of(settings: Settings, optimizer: type[torch.optim.AdamW] = torch.optim.AdamW) -> list[float]:
    mesh = make_mesh(settings, torch.device("cpu"))
    with mock.patch("torch.optim.AdamW", optimizer):
        losses = train.train(settings, read_text(settings.data), mesh)
    mesh.close()
    return losses


def one_process(settings: Settings) -> list[float]:
    return reference_losses(settings, read_text(settings.data), torch.device("cpu"))


def references() -> dict[int, list[float]]:
    return {layers: one_process(dataclasses.replace(TINY, layers=layers)) for layers in (2, 4)}


@pytest.fixture(scope="module")
def reference() -> dict[int, list[float]]:
    """The losses by the number of layers."""
    # In a process of its own: one that has run a backward has threads, and should not be forked any more.
    return run_ranks(1, references)[0]


# With four layers where the run is continued on four stages.
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    8: [{"pp": 2, "tp": 2, "microbatches": 4}, {"pp": 2, "cp": 2, "tp": 2, "layers": 2}],
    4: [
        {"tp": 2, "microbatches": 2, "layers": 2},
        {"cp": 2, "microbatches": 2, "layers": 2},
        {"pp": 2, "layers": 2},
    ],
}


def losses_of_each(settings: list[Settings]) -> list[list[float]]:
    """The losses on one layout after the other; on DTensors torch's own optimizer works on the first."""
    first, *others = settings
    return [losses_of(first), *(losses_of(each, AdamWOfShards) for each in others)]


def test_losses_are_those_of_one_process_also_on_another_layout_from_a_checkpoint(
    tmp_path: Path, reference: dict[int, list[float]]
) -> None:
    settings = [dataclasses.replace(TINY, **layout) for layout in LAYOUTS[8]]
    settings[0] = dataclasses.replace(settings[0], checkpoint=str(tmp_path), save_every=2)
    first = str(tmp_path / "step-000002")
    by_rank = run_ranks(
        8, losses_of_each, [*settings, dataclasses.replace(TINY, pp=4, tp=2, resume=first)], timeout=180.0
    )
    assert all(losses == by_rank[0] for losses in by_rank)
    *whole, continued = by_rank[0]
    for losses, each in zip(whole, settings, strict=True):
        expected = reference[each.layers]
        assert expected[-1] < expected[0] - 0.01
        assert losses == pytest.approx(expected, abs=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004"]
    rest = pytest.approx(reference[4][2:], abs=1e-9)
    assert continued == rest
    on_four = run_ranks(4, losses_of, dataclasses.replace(TINY, tp=4, resume=first))
    assert on_four[0] == rest
    alone = run_ranks(1, losses_of, dataclasses.replace(TINY, resume=first))
    assert alone[0] == rest


@pytest.mark.parametrize("pipelines", [False, True])
def test_losses_on_four_ranks_are_those_of_one_process(
    pipelines: bool, reference: dict[int, list[float]]
) -> None:
    layouts = [layout for layout in LAYOUTS[4] if pipelines == ("pp" in layout)]
    by_rank = run_ranks(4, losses_of_each, [dataclasses.replace(TINY, **layout) for layout in layouts])
    assert all(losses == by_rank[0] for losses in by_rank)
    for losses in by_rank[0]:
        assert losses == pytest.approx(reference[2], abs=1e-9)


def compiled() -> tuple[list[float], int]:
    """The losses with layers that are compiled without a break, and how many graphs that made."""
    warnings.simplefilter("ignore")  # the compiler warns about what torch itself does
    counter = CompileCounterWithBackend("eager")
    settings = dataclasses.replace(TINY, layers=2, tp=2, recompute=True, compile=True)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True)):
        return losses_of(settings, AdamWOfShards), counter.frame_count


def test_losses_with_compiled_layers_are_those_of_one_process(reference: dict[int, list[float]]) -> None:
    for losses, graphs in run_ranks(2, compiled):
        assert losses == pytest.approx(reference[2], abs=1e-9)
        assert graphs >= 1


WITH_EXPERTS = dataclasses.replace(TINY, moe=True, steps=2, layers=2)


def test_losses_with_experts_are_those_of_one_process() -> None:
    expected = run_ranks(1, one_process, WITH_EXPERTS)[0]
    layouts: dict[int, dict[str, Any]] = {4: {"tp": 2, "ep": 2, "etp": 2}, 8: {"pp": 2, "cp": 2, "ep": 2}}
    for ranks, layout in layouts.items():
        for losses in run_ranks(ranks, losses_of, dataclasses.replace(WITH_EXPERTS, **layout)):
            assert losses == pytest.approx(expected, abs=1e-9)


def test_all_that_is_wrong_is_told_at_once() -> None:
    settings = Settings(pp=8, layers=4, tp=3, dp=1, batch=30, microbatches=4, ep=5, etp=2, dim=100)
    assert settings.problems(24) == [
        "4 layers cannot fill pp=8 stages; give at least one a stage",
        "--microbatches 4 is too few for pp=8; give one a stage",
        "--ep and --etp are for experts; give --moe, too",
        "--etp 2 must be 1 or tp=3: these ranks have the same tokens",
        "--dim 100 is not divisible by 2 * --heads 16; the next that is: 128",
        "--batch 30 is not divisible by dp=1 times 4 microbatches; the next that is: 32",
        "--seq 64 is not divisible by 3, for cp=1 and tp=3; the next that is: 66",
        "--heads 16 is not divisible by tp=3; the next that is: 18",
        "--kv-heads 8 is not divisible by tp=3; the next that is: 9",
        "the vocabulary 256 is not divisible by tp=3; the next that is: 258",
        "the feed-forward width 272 is not divisible by tp=3; the next that is: 273",
        "the number of experts 8 is not divisible by ep=5; the next that is: 10",
        "the number of ranks of a stage 3 is not divisible by ep times etp; the next that is: 10",
    ]


def test_a_layout_that_does_not_fit_is_told_with_the_rest() -> None:
    first, second = Settings(seq=0, tp=3).problems(8)
    assert first == "--seq must be a number above 0, not 0"
    assert "tp=3" in second
    assert "8 ranks" in second


def refused(arguments: list[str]) -> tuple[object, list[str]]:
    out = StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(out),
        mock.patch.object(sys, "argv", ["train.py", *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    return ended.value.code, out.getvalue().splitlines()


def test_the_script_refuses_on_one_screen(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ["--device", "cpu", "--seq", "0", "--lr", "nan", "--data", f"{tmp_path}/none"]
    arguments += ["--checkpoint", f"{tmp_path}/file"]
    ((code, told),) = run_ranks(1, refused, arguments, init=False)
    assert code == 2
    assert told == [
        "importing torch, world size 1 ...",
        "cannot train (rank 0):",
        "  - --seq must be a number above 0, not 0",
        "  - --lr must be a number above 0, not nan",
        f"  - --data {tmp_path}/none: 0 bytes are too few for --seq 0",
        f"  - --checkpoint {tmp_path}/file: File exists; give another directory, or ''",
    ]


def test_only_rank_0_speaks_about_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stopped:
        parse(["--stepz", "3"])
    assert stopped.value.code == 0
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stopped:
        parse(["--stepz", "3"])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --stepz 3" in capsys.readouterr().err


def trouble(directory: Path) -> list[str]:
    """A loss that is no number on every rank; an interrupt on one rank; checkpoints beyond those to keep."""
    last = directory / "last"
    settings = dataclasses.replace(TINY, tp=2, save_every=1, keep=2, checkpoint=str(last))
    told = []
    with pytest.raises(namedmesh.TrainingError) as raised:
        losses_of(dataclasses.replace(settings, lr=1e300, checkpoint=str(directory / "first")))
    told.append(str(raised.value))
    losses_of(dataclasses.replace(settings, steps=3))
    told += sorted(path.name for path in last.iterdir())
    update = mock.patch("train.progress", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGINT))
    resumed = dataclasses.replace(settings, steps=6, save_every=0, resume=str(last))
    with update if torch.distributed.get_rank() == 1 else nullcontext(), pytest.raises(KeyboardInterrupt):
        losses_of(resumed)
    return [*told, train.how_to_go_on(resumed)]


def requeued(directory: Path) -> list[list[float]]:
    """A job that is started again and again with one command line, with all that goes around the steps."""
    settings = dataclasses.replace(
        TINY, tp=2, recompute=True, checkpoint=str(directory), resume="auto", evaluate_every=1
    )
    first = losses_of(dataclasses.replace(settings, save_every=1, keep=0))
    leave_only(directory / "step-000001")
    again = losses_of(settings)
    return [first, again, losses_of(settings)]


def leave_only(checkpoint: Path) -> None:
    """Let the run have been interrupted after it saved this one."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for each in checkpoint.parent.iterdir():
            if each != checkpoint:
                shutil.rmtree(each)
    torch.distributed.barrier()


def test_a_job_that_is_queued_again_goes_on(tmp_path: Path, reference: dict[int, list[float]]) -> None:
    expected = reference[4]
    for first, again, nothing_left in run_ranks(2, requeued, tmp_path):
        assert first == pytest.approx(expected, abs=1e-9)
        assert again == pytest.approx(expected[1:], abs=1e-9)
        assert nothing_left == []


def test_trouble_is_told_and_leaves_checkpoints(tmp_path: Path) -> None:
    told = run_ranks(2, trouble, tmp_path)
    assert told[0] == told[1]
    text, *kept, going_on = told[0]
    assert text == (
        "the loss of step 2 is 5.54518, and the norm of its gradient nan; choose a lower --lr than 1e+300"
    )
    assert kept == ["step-000002", "step-000003"]
    assert going_on == f"to go on from step 4: --resume {tmp_path}/last --steps N"


def test_windows_cross_files_and_ranks_share_a_batch(tmp_path: Path) -> None:
    for name, words in (("a", "abc"), ("b", ""), ("c", "defgh"), ("d", "i")):
        (tmp_path / name).write_text(words)
    text = read_text(str(tmp_path))
    assert len(text) == 9
    settings = Settings(seed=1, batch=16, seq=5)
    inputs, targets = train.draw_batch(text, settings, 0)
    assert inputs.shape == targets.shape == (16, 5)
    windows = {bytes(window.tolist()) for window in inputs}
    assert windows == {b"abcde", b"bcdef", b"cdefg", b"defgh"}
    assert torch.equal(targets, inputs + 1)
    halves = [train.draw_batch(text, settings, 0, rows)[0] for rows in (slice(0, 8), slice(8, 16))]
    assert torch.equal(torch.cat(halves), inputs)
    assert not torch.equal(train.draw_batch(text, settings, 1)[0], inputs)


def test_the_default_text_is_the_library() -> None:
    assert len(read_text(None)) > 1_000_000
    assert len(read_text("no-such-file")) == 0


def test_parts_of_the_model_are_the_whole() -> None:
    settings = Settings(dim=16, layers=5, heads=4, kv_heads=2, seed=3)
    whole = new_model(settings)
    found: dict[str, torch.Tensor] = {}
    tokens = torch.randint(256, (2, 6))
    through = tokens
    for stage in range(3):
        part = new_model(settings, stage_layers(5, None, stage=stage, stages=3))
        assert not found.keys() & part.state_dict().keys()
        found |= part.state_dict()
        through = part(through)
    assert found.keys() == whole.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    assert torch.equal(through, whole(tokens))


def test_positions_see_only_what_is_before_them() -> None:
    model = new_model(Settings(dim=16, layers=2, heads=4, kv_heads=2))
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    differs = (model(tokens) != model(changed)).any(dim=-1)[0].tolist()
    assert differs == [False] * 5 + [True] * 3


def test_rotary_scores_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = rotate(query.expand(6, 8)) @ rotate(key.expand(6, 8)).T
    for distance in range(-5, 6):
        along = scores.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-5)
    assert scores[0, 0] == pytest.approx(float(query @ key))
    assert (scores[0, 1:] - scores[0, 0]).abs().min() > 1e-3


def test_picture_of_the_mesh() -> None:
    assert picture(namedmesh.Layout(pp=2, dp=2, tp=2), layers=5).splitlines() == [
        "        pp 0, layers 0-1  pp 1, layers 2-4",
        "  dp 0  [0 1]             [4 5]",
        "  dp 1  [2 3]             [6 7]",
        "In brackets: the ranks that work together on these layers and this part of the batch.",
    ]
