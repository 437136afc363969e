"""Memory that the planner predicts, and what torch allocates in the training example on the CPU, by layout.

    python benchmarks/memory.py [--seq S] [--dim D] [--vocab V]

On the rank that needs the most, in float32: parameters, gradients and the state of AdamW, sharded by FSDP2 (stage 3 of
ZeRO), and the most that is allocated in a step on top of them. torch's profiler counts every allocation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from parallel import Step, make_mesh
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from train import Settings, make_model, make_optimizer

from namedmesh.plan import Job, Memory, Model, estimate_memory

LAYOUTS = (
    {"dp": 8, "tp": 1},
    {"dp": 4, "tp": 2},
    {"dp": 2, "tp": 4},
    {"dp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 4, "dp": 1, "tp": 2},
    {"pp": 2, "dp": 4, "tp": 1, "microbatches": 4},
)
ROWS = 4  # sequences of a data-parallel rank in a step


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(settings: list[Settings]) -> list[tuple[int, int]]:
    """Return bytes of the states after a step, and the most that the next step allocates, for each layout."""
    return [_measure(one) for one in settings]


def _measure(settings: Settings) -> tuple[int, int]:
    mesh = make_mesh(settings, torch.device("cpu"))
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model, 1e-3)
    step = Step(model, mesh, microbatches=settings.microbatches or settings.pp)
    tokens = torch.randint(
        256, (ROWS, settings.seq + 1), generator=torch.Generator().manual_seed(mesh.rank("dp"))
    )
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for _ in range(2):
        step(*batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    states = [  # of which several may lie in one storage
        local(each).untyped_storage()
        for parameter in model.parameters()
        for each in (parameter, parameter.grad, *optimizer.state[parameter].values())
        if isinstance(each, torch.Tensor) and each.ndim
    ]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, record_function("step"):
        step(*batch)
    mesh.close()
    return sum({each.data_ptr(): each.nbytes() for each in states}.values()), _most(profiled)


def _most(profiled: profile) -> int:
    """Return the most bytes allocated at a time, beyond those at the start."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/trace.json"
        profiled.export_chrome_trace(path)
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]")
    total = most = 0
    for _, change in changes:
        total += change
        most = max(most, total)
    return most


def predict(settings: Settings) -> Memory:
    """Return what the planner expects of the pipeline rank that needs the most."""
    model = Model(
        layers=settings.layers,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        hidden=settings.dim,
        ffn=settings.feed_forward,
        vocab=settings.vocabulary,
    )
    job = Job(
        model,
        seq=settings.seq,
        global_batch=ROWS * settings.dp,
        micro_batch=ROWS // (settings.microbatches or settings.pp),
        precision="fp32",
        checkpointing="none",
    )
    return estimate_memory(job, {axis: getattr(settings, axis) for axis in ("pp", "dp", "cp", "tp")})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=16384)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = {"seq": arguments.seq, "dim": arguments.dim, "layers": 8, "vocabulary": arguments.vocab}
    settings = [
        Settings(**layout, **sizes, dtype="float32", device="cpu", checkpoint="")  # type: ignore[arg-type]
        for layout in LAYOUTS
    ]
    by_rank = run_ranks(8, measure, settings, timeout=500)
    row = "{:30} {:>10} {:>10} {:>7}   {}"
    print(
        row.format("layout", "predicted", "measured", "error", "of it: states, gathered, activations, loss")
    )
    for number, (layout, one) in enumerate(zip(LAYOUTS, settings, strict=True)):
        predicted, measured = predict(one), max(sum(rank[number]) for rank in by_rank)
        # The most at a time: the loss is done before the first layer's backward pass.
        allocated = predicted.total - min(predicted.loss, predicted.backward)
        parts = (predicted.states, predicted.gathered, predicted.activations, predicted.loss)
        name = " ".join(f"{axis}={size}" for axis, size in layout.items())
        shown = [f"{each / 1e6:.2f} MB" for each in (allocated, measured)]
        error = f"{allocated / measured - 1:+.1%}"
        print(row.format(name, *shown, error, ", ".join(f"{part / 1e6:.1f}" for part in parts)))


if __name__ == "__main__":
    main()
