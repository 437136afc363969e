"""A run that continues on one layout after the other, through checkpoints, is the run of one process."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from ranks import run_ranks
from training_checks import PIPELINES
from training_model import alone, loaded_alone, train_one_step, train_through

from namedmesh._torch import TORCH

if TYPE_CHECKING:
    from pathlib import Path

# On as many ranks as a layout needs: what one job saved another reads that has more of them. Of tp=4 and of four stages
# the tests of the training script continue.
ON_FOUR: list[tuple[dict[str, Any], str, int]] = [
    ({"pp": 1, "dp": 4, "tp": 1}, "1F1B", 1),
    ({"pp": 1, "dp": 2, "tp": 2}, "GPipe", 3),
]
ON_EIGHT: list[tuple[dict[str, Any], str, int]] = [
    ({"pp": 1, "dp_replicate": 2, "dp_shard": 2, "tp": 2}, "1F1B", 1),
    ({"pp": 1, "dp": 2, "cp": 2, "tp": 2}, "1F1B", 1),
    # Up to torch 2.12 schedules of two backward passes refuse functions written in Python, such as our layers' and DTensor's.
    ({"pp": 2, "dp": 2, "tp": 2}, "ZBV" if TORCH.release >= (2, 13) else "Interleaved1F1B", 4),
]


@PIPELINES
def test_every_layout_continues_the_run_of_one_process(tmp_path: Path) -> None:
    steps, first = len(ON_FOUR + ON_EIGHT), len(ON_FOUR)
    paths = [str(tmp_path / str(number)) for number in range(steps + 1)]
    ((expected, state),) = run_ranks(1, alone, paths[0], steps, init=False)
    assert all(after < before - 1e-3 for before, after in expected)
    on_four = run_ranks(4, train_through, ON_FOUR, paths[: first + 1], timeout=120.0)
    on_eight = run_ranks(8, train_through, ON_EIGHT, paths[first:], timeout=200.0)
    for by_rank in (on_four, on_eight):
        assert all(told == by_rank[0] for told in by_rank)
    pairs = zip(on_four[0] + on_eight[0], expected, strict=True)
    differences = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs]
    (loaded,) = run_ranks(1, loaded_alone, paths[-1], init=False)
    for one, other in zip(loaded, state, strict=True):
        differences += [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert max(differences) < 1e-9


def compiled(source: str, target: str) -> tuple[float, float]:
    warnings.simplefilter("ignore")  # the compiler warns about what torch itself does
    sizes = {"pp": 1, "dp": 1, "cp": 2, "tp": 2}
    return train_one_step(sizes, "1F1B", 3, source, target, compiled=True)


@PIPELINES
def test_a_step_with_a_compiled_layer_is_that_of_one_process(tmp_path: Path) -> None:
    paths = str(tmp_path / "0"), str(tmp_path / "1")
    ((expected, state),) = run_ranks(1, alone, paths[0], 1, init=False)
    for told in run_ranks(4, compiled, *paths):
        assert told == pytest.approx(expected[0], abs=1e-9)
    (loaded,) = run_ranks(1, loaded_alone, paths[1], init=False)
    assert [each for one in loaded for each in one] == pytest.approx(
        [each for one in state for each in one], abs=1e-9
    )
