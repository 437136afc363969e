"""The options of the training script, and everything that can be wrong with them."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from experts import EXPERTS
from llama import ModelSizes

from namedmesh import Layout, LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Settings", "parse"]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}


def option(default: object, words: str, **more: Any) -> Any:
    """A field that is also an option of the command line, explained in ``words``."""
    return field(default=default, metadata={"help": words, "type": type(default), **more})


@dataclass(frozen=True)
class Settings:
    """One field for each option; ``kv_heads`` is ``--kv-heads``."""

    pp: int = option(1, "pipeline stages")
    dp: int = option(-1, "data-parallel ranks; -1 for whatever is left")
    cp: int = option(1, "context-parallel ranks: each has a part of every sequence")
    tp: int = option(1, "tensor-parallel ranks")
    moe: bool = option(False, "a mixture of experts in place of each feed-forward network")
    ep: int = option(1, "with --moe: the ranks that share the experts")
    steps: int = option(80, "where training ends, counted from the very first step")
    batch: int = option(32, "sequences in a step, over all ranks")
    seq: int = option(64, "bytes in a sequence")
    dim: int = option(128, "width of the model")
    layers: int = option(4, "number of layers")
    heads: int = option(16, "attention heads")
    kv_heads: int = option(8, "heads of keys and values, shared by the attention heads")
    lr: float = option(0.008, "highest learning rate")
    clip: float = option(1.0, "largest norm of the gradients that is not scaled down")
    microbatches: int = option(0, "pieces that a rank's share of a batch is worked off in; 0 for one a stage")
    seed: int = option(0, "of the first weights and of the order of the data")
    data: str | None = option(
        None, "a file or a directory to learn from (default: Python's library)", type=str
    )
    checkpoint: str = option("checkpoints", "directory to save to; '' to save nothing")
    save_every: int = option(0, "steps between checkpoints; 0 to save at the end only")
    resume: str | None = option(None, "a checkpoint, or a directory of them, to continue from", type=str)
    verify: bool = option(False, "repeat the run in one process and compare the losses")
    dtype: str | None = option(
        None, "float32, float64 or bfloat16 (default: float32; float64 with --verify)", type=str
    )
    device: str | None = option(None, "cpu, cuda, ... (default: what torch finds)", type=str)

    @property
    def sizes(self) -> ModelSizes:
        """What decides the shapes of the parameters."""
        return ModelSizes(dim=self.dim, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads)

    @property
    def precision(self) -> torch.dtype:
        """What the parameters and everything computed from them are stored as.

        Training amplifies rounding: two runs that add the same numbers in another order are 1e-3 apart after a
        hundred steps in single precision, on one process or many. A comparison needs double precision to see
        anything else.
        """
        return DTYPES[self.dtype or ("float64" if self.verify else "float32")]

    @property
    def pieces(self) -> int:
        """The number of microbatches; a pipeline needs at least one for each stage to be busy at all."""
        return self.microbatches or self.pp

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due when ``step`` is done."""
        done = step + 1
        due = done == self.steps or (self.save_every > 0 and done % self.save_every == 0)
        return bool(self.checkpoint) and due

    def problems(self, world_size: int) -> list[str]:
        """What is wrong with these settings in a world of this size, one sentence each."""
        found = [
            f"--{name} must be at least {least}, not {value}"
            for name, least, value in (
                ("steps", 1, self.steps),
                ("batch", 1, self.batch),
                ("seq", 1, self.seq),
                ("microbatches", 0, self.microbatches),
                ("save-every", 0, self.save_every),
            )
            if value < least
        ]
        if self.dtype is not None and self.dtype not in DTYPES:
            found.append(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        found += self.sizes.problems()
        try:
            layout = Layout(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, world_size=world_size)
        except LayoutError as error:
            return [*found, *error.problems]
        # A number that is out of range is reported once, not again for what it does not divide.
        return found or self._misfits(layout)

    def _misfits(self, layout: Layout) -> list[str]:
        found = []
        if self.layers < layout["pp"]:
            found.append(
                f"{self.layers} layers cannot fill pp={layout['pp']} stages; give at least one a stage"
            )
        if 0 < self.microbatches < layout["pp"]:
            found.append(
                f"--microbatches {self.microbatches} is too few for pp={layout['pp']}; give one a stage"
            )
        if self.batch % (layout["dp"] * self.pieces):
            found.append(
                f"--batch {self.batch} is not divisible by dp={layout['dp']} times {self.pieces} microbatches; the "
                f"next that is: {-(-self.batch // (layout['dp'] * self.pieces)) * layout['dp'] * self.pieces}"
            )
        # Two chunks of a sequence for each cp rank, and the norms work on a part of these on each tp rank.
        chunks = 2 * layout["cp"] * layout["tp"] if layout["cp"] > 1 else layout["tp"]
        if self.seq % chunks:
            found.append(
                f"--seq {self.seq} is not divisible by {chunks}, for cp={layout['cp']} and tp={layout['tp']}"
            )
        if self.ep > 1 and (not self.moe or EXPERTS % self.ep or layout.world_size // layout["pp"] % self.ep):
            found.append(
                f"--ep {self.ep} needs --moe, and has to divide its {EXPERTS} experts and the "
                f"{layout.world_size // layout['pp']} ranks of a pipeline stage"
            )
        cut = {
            "--heads": self.heads,
            "--kv-heads": self.kv_heads,
            "the vocabulary": self.sizes.vocabulary,
            "the feed-forward width": self.sizes.feed_forward,
        }
        found += [
            f"{name} {size} is not divisible by tp={layout['tp']}"
            for name, size in cut.items()
            if size % layout["tp"]
        ]
        return found


class _Parser(argparse.ArgumentParser):
    """A parser of which only rank 0 speaks, and only rank 0 fails: one message, not one for each rank."""

    def print_help(self, file: Any = None) -> None:
        if _first():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if _first():
            super().error(message)
        raise SystemExit(0)


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """The settings that the command line asks for."""
    parser = _Parser(
        description="Train a small language model on bytes: pipeline x data x tensor parallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for item in fields(Settings):
        name = "--" + item.name.replace("_", "-")
        words, kind = item.metadata["help"], item.metadata["type"]
        if kind is bool:
            parser.add_argument(name, action="store_true", help=words)
        else:
            shown = argparse.SUPPRESS if item.default is None else item.default
            parser.add_argument(name, type=kind, default=shown, help=words, metavar=kind.__name__.upper())
    return Settings(**vars(parser.parse_args(arguments)))


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"
