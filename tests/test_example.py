"""The training script: every layout gives the losses of one process, and checkpoints fit all of them."""

from __future__ import annotations

import dataclasses
import math
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
from llama import Llama, ModelSizes, first_weights, rotate
from parallel import Step, loss_sum, make_model, whole_model
from plain import reference_losses
from progress import picture
from ranks import run_ranks
from settings import Settings, parse
from text import Corpus, find_corpus
from tiny import AdamWOfShards
from torch._dynamo.testing import CompileCounterWithBackend
from training_checks import PIPELINES

import namedmesh
from namedmesh import training
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
    mesh = train.make_mesh(settings, torch.device("cpu"))
    # In bytes, of which each takes all stages; other tests compare more.
    with mock.patch.object(train, "SAMPLE", 2), mock.patch("torch.optim.AdamW", optimizer):
        losses, _ = train.train(settings, find_corpus(settings.data), mesh)
    mesh.close()
    return losses


def one_process(settings: Settings) -> list[float]:
    return reference_losses(settings, find_corpus(settings.data), torch.device("cpu"))


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


@PIPELINES
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


@pytest.mark.parametrize("pipelines", [False, pytest.param(True, marks=PIPELINES)])
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


def dropped(settings: Settings) -> tuple[list[bool], list[float]]:
    """Which outputs of attention a rank drops, and the losses."""
    mesh = train.make_mesh(settings, torch.device("cpu"))
    training.seed_all(0, mesh)
    attention: Any = make_model(settings, mesh).layers["0"].attention
    heads = torch.ones(1, 2, 4, 4)
    with torch.no_grad():
        assert attention.attend(heads, heads, heads).eq(1).all()  # not where text is generated
    mask = attention.attend(heads, heads, heads).eq(0).flatten().tolist()
    mesh.close()
    return mask, losses_of(settings)


def test_each_tp_rank_drops_others_of_its_heads() -> None:
    (first, losses), (second, same) = run_ranks(
        2, dropped, dataclasses.replace(TINY, tp=2, steps=2, layers=1, verify=False, dropout=0.5)
    )
    assert first != second
    assert sum(first) * sum(second) > 0
    assert losses == same
    assert Settings(dropout=0.5, verify=True).problems(1) == [
        "--dropout must be from 0 to below 1, and 0 with --verify, not 0.5"
    ]


PROMPT = b"def __init"


def samples(layouts: list[dict[str, Any]]) -> list[bytes]:
    found = []
    for layout in layouts:
        settings = dataclasses.replace(TINY, layers=2, **layout)
        mesh = train.make_mesh(settings, torch.device("cpu"))
        step = Step(make_model(settings, mesh), mesh, microbatches=settings.microbatches or settings.pp)
        found.append(step.generate(PROMPT, settings.seq, train.SAMPLE))
        mesh.close()
    return found


def samples_of_whole_models() -> list[bytes]:
    """The same of models that know of no ranks, from as much text as there is."""
    found = []
    for moe in (False, True):
        model = whole_model(dataclasses.replace(TINY, layers=2, moe=moe)).double()
        text = bytearray(PROMPT)
        with torch.no_grad():
            while len(text) < TINY.seq:
                text.append(int(model(torch.tensor([[*text]]))[0, -1].argmax()))
        found.append(bytes(text[len(PROMPT) :]))
    return found


@PIPELINES
def test_the_sample_is_that_of_the_whole_model() -> None:
    dense, experts = run_ranks(1, samples_of_whole_models)[0]
    assert len(set(dense)) > 2
    layouts: list[dict[str, Any]] = [{"tp": 2, "microbatches": 4}, {"ep": 2, "moe": True}]
    layouts = [{"pp": 2, "cp": 2, **each} for each in layouts]
    assert run_ranks(8, samples, layouts) == [[dense, experts]] * 8


WITH_EXPERTS = dataclasses.replace(TINY, moe=True, steps=2, layers=2)


@PIPELINES
def test_losses_with_experts_are_those_of_one_process() -> None:
    expected = run_ranks(1, one_process, WITH_EXPERTS)[0]
    layouts: dict[int, dict[str, Any]] = {4: {"tp": 2, "ep": 2}, 8: {"pp": 2, "cp": 2, "ep": 2}}
    for ranks, layout in layouts.items():
        for losses in run_ranks(ranks, losses_of, dataclasses.replace(WITH_EXPERTS, **layout)):
            assert losses == pytest.approx(expected, abs=1e-9)


def interrupted_and_resumed(settings: Settings) -> tuple[set[str], list[float]]:
    losses_of(settings)
    longer = dataclasses.replace(settings, steps=2, resume=settings.checkpoint)
    broken = mock.patch(
        "torch.distributed.checkpoint.FileSystemWriter.write_data", side_effect=KeyboardInterrupt
    )
    with broken, pytest.raises(KeyboardInterrupt):
        losses_of(longer)
    return {path.name for path in Path(settings.checkpoint).iterdir()}, losses_of(longer)


def test_an_interrupted_save_keeps_the_one_before(tmp_path: Path, reference: dict[int, list[float]]) -> None:
    settings = dataclasses.replace(TINY, steps=1, checkpoint=str(tmp_path))
    ((left, resumed),) = run_ranks(1, interrupted_and_resumed, settings)
    assert left == {"step-000001"}
    # The rate of a step depends on where training ends, but the first step's weights are what was saved.
    assert resumed == [pytest.approx(reference[4][1], abs=1e-2)]


def test_all_that_is_wrong_is_told_at_once() -> None:
    settings = Settings(pp=8, layers=4, tp=3, dp=1, batch=30, microbatches=4)
    assert settings.problems(24) == [
        "4 layers cannot fill pp=8 stages; give at least one a stage",
        "--microbatches 4 is too few for pp=8; give one a stage",
        "--batch 30 is not divisible by dp=1 times 4 microbatches; the next that is: 32",
        "--seq 64 is not divisible by 3, for cp=1 and tp=3; the next that is: 66",
        "--heads 16 is not divisible by tp=3; the next that is: 18",
        "--kv-heads 8 is not divisible by tp=3; the next that is: 9",
        "the vocabulary 256 is not divisible by tp=3; the next that is: 258",
        "the feed-forward width 352 is not divisible by tp=3; the next that is: 354",
    ]


def test_experts_that_do_not_fit_are_told() -> None:
    assert Settings(ep=3, cp=2, seq=6).problems(8) == [
        "--ep 3 is for experts; give --moe, too",
        "--seq 6 is not divisible by 4, for cp=2 and tp=1; the next that is: 8",
        "the number of experts 8 is not divisible by ep=3; the next that is: 9",
        "the number of ranks 8 is not divisible by ep=3; the next that is: 9",
    ]


def test_sizes_that_are_no_model() -> None:
    assert Settings(dim=100, heads=16, kv_heads=3, steps=0, dtype="int8").problems(1) == [
        "--steps must be at least 1, not 0",
        "--dtype must be one of float32, float64, bfloat16, not int8",
        "dim 100 is not divisible by 16 heads",
        "16 heads cannot share 3 kv heads evenly",
    ]
    assert Settings(layers=0).problems(1) == ["layers must be at least 1, not 0"]
    assert Settings(dim=16, heads=16).problems(1) == ["dim / heads must be even for rotary embeddings, not 1"]


def test_a_layout_that_does_not_fit_is_told_with_the_rest() -> None:
    first, second = Settings(seq=0, tp=3).problems(8)
    assert first == "--seq must be at least 1, not 0"
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
    arguments += ["--resume", str(tmp_path), "--checkpoint", f"{tmp_path}/file"]
    ((code, told),) = run_ranks(1, refused, arguments, init=False)
    assert code == 2
    assert told == [
        "importing torch, world size 1 ...",
        "cannot train (rank 0):",
        "  - --seq must be at least 1, not 0",
        "  - --lr must be a number above 0, not nan",
        f"  - --data {tmp_path}/none: there is no such file or directory, or no file in it",
        f"  - --resume {tmp_path}: there is no finished checkpoint",
        f"  - --checkpoint {tmp_path}/file: File exists; give another directory, or '' for none",
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
    update = mock.patch("train.Progress.update", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGINT))
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
    real, calls = training.clip_grad_norm_, []

    def broken(*args: Any) -> torch.Tensor:
        calls.append(1)
        return real(*args) * (math.nan if len(calls) == 1 else 1)

    with mock.patch.object(training, "clip_grad_norm_", broken):
        skipped = losses_of(dataclasses.replace(settings, checkpoint="", resume=None, steps=3, skip=1))
    inputs, targets = find_corpus(TINY.data).batch(seed=TINY.seed, step=1, batch=TINY.batch, seq=TINY.seq)
    untrained = loss_sum(whole_model(TINY).double()(inputs), targets) / targets.numel()
    return [first, again, [skipped[1], untrained.item()]]


def leave_only(checkpoint: Path) -> None:
    """Let the run have been interrupted after it saved this one."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for each in checkpoint.parent.iterdir():
            if each != checkpoint:
                shutil.rmtree(each)
    torch.distributed.barrier()


def dropping(directory: Path) -> tuple[list[float], list[float]]:
    settings = dataclasses.replace(
        TINY, pp=2, verify=False, dropout=0.3, checkpoint=str(directory), resume="auto"
    )
    whole = losses_of(dataclasses.replace(settings, save_every=2))
    leave_only(directory / "step-000002")
    return whole, losses_of(settings)


@PIPELINES
def test_a_resumed_pipeline_drops_what_it_would_have_dropped(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(2, dropping, tmp_path):
        assert resumed == whole[2:]


def test_a_job_that_is_queued_again_goes_on(tmp_path: Path, reference: dict[int, list[float]]) -> None:
    expected = reference[4]
    for first, again, (after_skipped, untrained) in run_ranks(2, requeued, tmp_path):
        assert first == pytest.approx(expected, abs=1e-9)
        assert again == pytest.approx(expected[1:], abs=1e-9)
        assert after_skipped == pytest.approx(untrained, abs=1e-9)


def test_trouble_is_told_and_leaves_checkpoints(tmp_path: Path) -> None:
    told = run_ranks(2, trouble, tmp_path)
    assert told[0] == told[1]
    text, *kept, going_on = told[0]
    assert text == (
        "the loss of step 2 is 5.54518, and the norm of its gradient nan; choose a lower --lr than 1e+300"
    )
    assert kept == ["step-000002", "step-000003"]
    assert going_on == f"to go on from step 4: --resume {tmp_path}/last --steps N"


def test_a_run_that_is_done_is_not_continued(tmp_path: Path) -> None:
    step = tmp_path / "step-000004"
    training.save(step, None, torch.nn.Linear(1, 1), step=4)
    settings = dataclasses.replace(TINY, checkpoint=str(tmp_path))
    corpus, room = find_corpus(settings.data), shutil.disk_usage(tmp_path)
    with mock.patch("torch.distributed.get_world_size", return_value=1):
        assert train.check(dataclasses.replace(settings, steps=5, resume=str(tmp_path)), corpus) == []
        assert train.check(dataclasses.replace(settings, resume=str(step)), corpus) == [
            f"{step} has done 4 steps already; ask for more with --steps"
        ]
        parameters = sum(each.numel() for each in Llama(settings.sizes).parameters())
        full = room._replace(free=24 * parameters)
        with mock.patch("shutil.disk_usage", return_value=full):
            assert train.check(settings, corpus) == []
        with mock.patch("shutil.disk_usage", return_value=full._replace(free=full.free - 1)):
            assert train.check(settings, corpus) == [
                f"--checkpoint {tmp_path}: a checkpoint has 2 MB, and 2 MB are free there; give another directory, or '' for none"
            ]


def test_windows_cross_files_and_ranks_share_a_batch(tmp_path: Path) -> None:
    for name, text in (("a", "abc"), ("b", ""), ("c", "defgh"), ("d", "i")):
        (tmp_path / name).write_text(text)
    corpus = find_corpus(str(tmp_path))
    assert corpus.size == 9

    def batch(rows: slice, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return corpus.batch(seed=1, step=step, batch=16, seq=5, rows=rows)

    inputs, targets = batch(slice(None))
    assert inputs.shape == targets.shape == (16, 5)
    windows = {bytes(window.tolist()) for window in inputs}
    assert windows == {b"abcde", b"bcdef", b"cdefg", b"defgh"}
    assert torch.equal(targets, inputs + 1)
    halves = [batch(slice(0, 8)), batch(slice(8, 16))]
    assert torch.equal(torch.cat([half[0] for half in halves]), inputs)
    assert not torch.equal(batch(slice(None), step=1)[0], inputs)


def test_the_default_text_is_the_library() -> None:
    corpus = find_corpus(None)
    assert isinstance(corpus, Corpus)
    assert corpus.size > 1_000_000
    assert "argparse.py" in {path.name for path in corpus.files}
    assert find_corpus("no-such-file").size == 0


def test_parts_of_the_model_are_the_whole() -> None:
    sizes = ModelSizes(dim=16, layers=5, heads=4, kv_heads=2)
    whole = Llama(sizes)
    training.init_parameters(whole, 3, distribution=partial(first_weights, sizes))
    parts = [Llama(sizes, stage_layers(5, None, stage=stage, stages=3)) for stage in range(3)]
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        training.init_parameters(part, 3, distribution=partial(first_weights, sizes))
        assert not found.keys() & part.state_dict().keys()
        found |= part.state_dict()
    assert found.keys() == whole.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    tokens = torch.randint(256, (2, 6))
    through = tokens
    for part in parts:
        through = part(through)
    assert torch.equal(through, whole(tokens))


def test_positions_see_only_what_is_before_them() -> None:
    sizes = ModelSizes(dim=16, layers=2, heads=4, kv_heads=2)
    model = Llama(sizes)
    training.init_parameters(model, 0, distribution=partial(first_weights, sizes))
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
