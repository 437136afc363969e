"""The options of the training script, and everything that can be wrong with them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch
from llama import ModelSizes
from moe import EXPERTS

from namedmesh import Layout, LayoutError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}


def option(default: object, words: str, **more: Any) -> Any:
    """Return a field that is also an option of the command line, explained in ``words``."""
    return field(default=default, metadata={"help": words, "type": type(default), **more})


@dataclass(frozen=True)
class Settings:
    """One field for each option; ``kv_heads`` is ``--kv-heads``."""

    pp: int = option(1, "pipeline stages")
    dp: int = option(-1, "data-parallel ranks; -1 for whatever is left")
    cp: int = option(1, "context-parallel ranks: each has a part of every sequence")
    tp: int = option(1, "tensor-parallel ranks")
    moe: bool = option(False, "a mixture of experts in place of each feed-forward network")
    ep: int = option(1, "expert-parallel ranks, with --moe")
    steps: int = option(80, "where training ends, counted from the very first step")
    batch: int = option(32, "sequences in a step, over all ranks")
    seq: int = option(64, "bytes in a sequence")
    dim: int = option(128, "width of the model")
    layers: int = option(4, "number of layers")
    heads: int = option(16, "attention heads")
    kv_heads: int = option(8, "heads of keys and values, shared by the attention heads")
    lr: float = option(0.008, "highest learning rate")
    clip: float = option(1.0, "largest norm of the gradients that is not scaled down")
    dropout: float = option(0.0, "probability with which outputs of attention are dropped")
    microbatches: int = option(
        0,
        "parts that a rank's share of a batch is worked off in, whose gradients are added; 0 for one a stage",
    )
    recompute: bool = option(
        False, "keep only what goes into a layer, and compute the rest again in the backward"
    )
    compile: bool = option(False, "compile each layer")
    skip: int = option(0, "how many steps may be skipped because their gradient is not finite")
    evaluate_every: int = option(0, "steps between two looks at the loss on other text; 0 for none")
    seed: int = option(0, "of the first weights and of the order of the data")
    data: str | None = option(None, "a file or directory to learn from (default: Python's library)", type=str)
    checkpoint: str = option("checkpoints", "directory to save to; '' to save nothing")
    save_every: int = option(0, "steps between checkpoints; 0 to save at the end only")
    keep: int = option(3, "how many of the checkpoints up to the last one stay; 0 for all")
    timeout: float = option(
        600.0, "seconds that ranks wait for each other, after which one that hangs is named"
    )
    resume: str | None = option(
        None,
        "a checkpoint, or a directory of them, to continue from; auto for the last one in --checkpoint, if there is one",
        type=str,
    )
    verify: bool = option(False, "repeat the run in one process and compare the losses")
    dtype: str | None = option(None, f"{', '.join(DTYPES)} (default: float32; float64 to verify)", type=str)
    device: str | None = option(None, "cpu, cuda, ... (default: what torch finds)", type=str)

    @property
    def sizes(self) -> ModelSizes:
        """What decides the shapes of the parameters."""
        return ModelSizes(dim=self.dim, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads)

    @property
    def precision(self) -> torch.dtype:
        """What everything is computed in; a comparison in less than double precision sees rounding alone."""
        return DTYPES[self.dtype or ("float64" if self.verify else "float32")]

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint is due when ``step`` is done."""
        return step + 1 == self.steps or (self.save_every > 0 and (step + 1) % self.save_every == 0)

    def problems(self, world_size: int) -> list[str]:
        """Return what is wrong with these settings in a world of this size, one sentence each."""
        least = {
            "steps": 1,
            "batch": 1,
            "seq": 1,
            "microbatches": 0,
            "ep": 1,
            "save_every": 0,
            "keep": 0,
            "skip": 0,
            "evaluate_every": 0,
        }
        found = [
            f"--{name.replace('_', '-')} must be at least {number}, not {getattr(self, name)}"
            for name, number in least.items()
            if getattr(self, name) < number
        ]
        found += [
            f"--{name} must be a number above 0, not {getattr(self, name)}"
            for name in ("lr", "clip", "timeout")
            if not 0 < getattr(self, name) < math.inf
        ]
        if not 0 <= self.dropout < 1 or (self.verify and self.dropout):
            found.append(f"--dropout must be from 0 to below 1, and 0 with --verify, not {self.dropout}")
        if self.dtype is not None and self.dtype not in DTYPES:
            found.append(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        found += self.sizes.problems()
        try:
            layout = Layout(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, world_size=world_size)
        except LayoutError as error:
            return [*found, *error.problems]
        # A number that is out of range is reported once, not again for what it does not divide.
        return found or self._indivisible(**dict(layout.items()), world_size=world_size)

    def _indivisible(self, pp: int, dp: int, cp: int, tp: int, world_size: int) -> list[str]:
        found = []
        if self.layers < pp:
            found.append(f"{self.layers} layers cannot fill pp={pp} stages; give at least one a stage")
        if 0 < self.microbatches < pp:
            found.append(f"--microbatches {self.microbatches} is too few for pp={pp}; give one a stage")
        if self.ep > 1 and not self.moe:
            found.append(f"--ep {self.ep} is for experts; give --moe, too")
        parts = (2 * cp if cp > 1 else 1) * tp  # two chunks of a sequence for each cp rank
        microbatches = self.microbatches or pp
        sizes = (
            ("--batch", self.batch, dp * microbatches, f"dp={dp} times {microbatches} microbatches"),
            ("--seq", self.seq, parts, f"{parts}, for cp={cp} and tp={tp}"),
            ("--heads", self.heads, tp, f"tp={tp}"),
            ("--kv-heads", self.kv_heads, tp, f"tp={tp}"),
            ("the vocabulary", self.sizes.vocabulary, tp, f"tp={tp}"),
            ("the feed-forward width", self.sizes.feed_forward, tp, f"tp={tp}"),
            ("the number of experts", EXPERTS, self.ep, f"ep={self.ep}"),
            ("the number of ranks", world_size // pp, self.ep, f"ep={self.ep}"),
        )
        return found + [
            f"{name} {size} is not divisible by {words}; the next that is: {-(-size // divisor) * divisor}"
            for name, size, divisor, words in sizes
            if size % divisor
        ]


class _Parser(argparse.ArgumentParser):
    """A parser of which only rank 0 speaks, and only rank 0 fails: one message, not one for each rank."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        raise SystemExit(0)


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Return the settings that the command line asks for."""
    parser = _Parser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    for item in fields(Settings):
        name = "--" + item.name.replace("_", "-")
        words, kind = item.metadata["help"], item.metadata["type"]
        if kind is bool:
            parser.add_argument(name, action="store_true", help=words)
        else:
            shown = argparse.SUPPRESS if item.default is None else item.default
            parser.add_argument(name, type=kind, default=shown, help=words, metavar=kind.__name__.upper())
    return Settings(**vars(parser.parse_args(arguments)))
