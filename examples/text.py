"""Bytes of real text, in an order that is a function of the seed and the step and nothing else."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """Files read as if they were one after the other."""

    files: tuple[Path, ...]
    ends: tuple[int, ...]  # where each file ends, counted in bytes from the start of the first

    @property
    def size(self) -> int:
        """The number of bytes in all files."""
        return self.ends[-1] if self.ends else 0

    def batch(
        self, *, seed: int, step: int, batch: int, seq: int, rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Return some of the sequences of a step, and their targets: target i is the byte after input i."""
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        # Every rank draws the starts of the whole batch, so that the batch is the same however it is divided.
        starts = torch.randint(self.size - seq, (batch,), generator=generator)[rows]
        windows = torch.stack([self._window(start, seq + 1) for start in starts.tolist()])
        # Contiguous, as a pipeline of torch 2.8 wants them.
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _window(self, start: int, length: int) -> Tensor:
        found = bytearray()
        index = bisect.bisect_right(self.ends, start)
        while len(found) < length:
            begin = self.ends[index - 1] if index else 0
            with self.files[index].open("rb") as file:
                file.seek(start + len(found) - begin)
                found += file.read(min(length - len(found), self.ends[index] - start - len(found)))
            index += 1
        return torch.frombuffer(found, dtype=torch.uint8).long()


def find_corpus(path: str | None) -> Corpus:
    """Return the text under ``path``, a file or a directory; without one, the running Python's standard library."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        # Installed packages differ between machines; tests are as large as all the rest, and duller.
        not_it = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
        found = (file for file in root.rglob("*.py") if not not_it & set(file.relative_to(root).parts))
    elif Path(path).is_dir():
        found = (file for file in Path(path).rglob("*") if file.is_file())
    else:
        found = (file for file in [Path(path)] if file.exists())
    files = sorted(found)
    return Corpus(tuple(files), tuple(itertools.accumulate(file.stat().st_size for file in files)))
