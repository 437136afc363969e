"""How the work of one rank for a checkpoint grows with the number of ranks and of names, beside DCP's own.

    python benchmarks/save_growth.py [--ranks N ...] [--names N]

A world of the fake backend: one process is rank 0 of any number, and collectives return at once. ``compare`` is what every rank
does to find out that replicas are the same, ``gather`` what rank 0 does with what all ranks send it: unpickle and judge it, and
write the manifest, with the sizes and checksums of a file of each rank.
"""

from __future__ import annotations

import argparse
import io
import pickle
import tempfile
import time
from functools import partial
from pathlib import Path

import paired
import torch
from ranks import fake_world
from torch import nn

import namedmesh
from namedmesh.training import checkpoints
from namedmesh.training.checkpoint_files import data_of, finish
from namedmesh.training.checkpoint_ranks import CheckpointGroup
from namedmesh.training.checkpoint_state import State
from namedmesh.training.comparison import differing, digest, table_of


def measured(ranks: int, names: int) -> tuple[float, float, float]:
    """Return the seconds of comparing and of gathering, and the MB that rank 0 gets."""
    with fake_world(ranks), tempfile.TemporaryDirectory() as place:
        mesh = namedmesh.init_mesh(dp=-1, tp=8, device="cpu")
        model = nn.ParameterDict({f"layer{number}": torch.zeros(64, 64) for number in range(names)})
        state = State(mesh, model)
        start = time.process_time()
        entries = state.compared()
        differing(mesh, entries, table_of(entries))
        compared = time.process_time() - start
        states = {
            name: digest(entry.value) for name, entry in state.entries.items() if name.startswith("random")
        }
        known = {"contradictions": {}, "extra": digest({"step": 1}), "per_rank": states}
        sent = [pickle.dumps(known) for _ in range(ranks)]
        files = [pickle.dumps({f"__{rank}_0.distcp": (10, 20)}) for rank in range(ranks)]
        path = Path(place) / "one"
        start = time.process_time()
        by_rank = [pickle.load(io.BytesIO(each)) for each in sent]  # noqa: S301  written above
        one = CheckpointGroup(None)
        made, copies = checkpoints._checked(path, one, {"step": 1}, by_rank)  # noqa: SLF001  its part of rank 0
        about = {"id": made, "per_rank": copies, "layout": None, "extra": {}}
        for rank in range(ranks):
            (data_of(path, about) / f"__{rank}_0.distcp").write_bytes(b"0" * 10)
        (data_of(path, about) / ".metadata").touch()
        written = [pickle.load(io.BytesIO(each)) for each in files]  # noqa: S301  written above
        about["files"] = {name: each for some in written for name, each in some.items()}
        finish(path, about)
        gathered = time.process_time() - start
        mesh.close()
        return compared, gathered, sum(map(len, sent + files)) / 1e6


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description="The growth of the work for a checkpoint.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--names", type=int, default=1000)
    arguments = parser.parse_args()
    print(f"{paired.machine()}; {arguments.names} names")
    row = partial(paired.row, widths=[8, 10, 10, 10])
    print(row(["ranks", "compare", "gather", "received"]))
    for ranks in arguments.ranks:
        compared, gathered, size = measured(ranks, arguments.names)
        print(row([str(ranks), f"{compared:.2f} s", f"{gathered:.2f} s", f"{size:.1f} MB"]))


if __name__ == "__main__":
    main()
