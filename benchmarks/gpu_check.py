"""Check namedmesh on one GPU, in at most eight minutes: correctness first, then speed.

    python benchmarks/gpu_check.py [--only SECTION ...] [--output FILE]

With a GPU, a section runs in one process with NCCL, or in two gloo ranks that share the GPU: NCCL refuses two ranks
on one device, and gloo sends neither CUDA tensors from one rank to another nor all-to-alls of them. Every section runs
in processes of its own with a time limit, so that a hang or a device-side assertion ends one section and not the check.
Without a GPU the sections run on the CPU as far as they can, with small sizes and more patience. It needs no
installation: `PYTHONPATH=src` is set here.

It prints a line for each section with PASS, SKIP or FAIL, a JSON summary (with `--output` into a file instead), and
how many sections passed in the last line. The exit status is 1 if a section failed, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from namedmesh import NamedMesh

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SCRIPT = Path(__file__).resolve()  # what the ranks of a section run
_RESULTS = "GPU_CHECK_RESULTS"  # the folder in which every rank of a section leaves its result


class SkippedError(Exception):
    """A section cannot run here; the text says why."""


class Section(NamedTuple):
    """One section: its function returns figures, and raises if something is wrong.

    Attributes:
        run: the function; it is called in every rank.
        ranks: the number of ranks: 1 with NCCL on a GPU, or several with gloo.
        seconds: the time limit on a GPU.
        cpu_ranks: the number of ranks on a CPU, if it differs.
        may_abort: whether the processes may end in a device-side assertion instead of a result.
    """

    run: Callable[[], dict[str, Any]]
    ranks: int
    seconds: int
    cpu_ranks: int = 0
    may_abort: bool = False

    @property
    def num_ranks(self) -> int:
        """The number of ranks on this host."""
        return self.cpu_ranks if self.cpu_ranks and not ON_GPU else self.ranks


# --- helpers -------------------------------------------------------------------------------------------------


def require(condition: object, text: str) -> None:
    """Fail the section unless a condition holds."""
    if not condition:
        raise AssertionError(text)


def require_gpu() -> None:
    """Skip the section without a GPU."""
    if not ON_GPU:
        raise SkippedError("it needs a GPU")


def require_torch(release: str) -> None:
    """Skip the section on an older torch."""
    from packaging.version import Version

    if Version(torch.__version__).release < Version(release).release:
        raise SkippedError(f"it needs torch {release}, and this is {torch.__version__}")


def require_close(actual: Any, expected: Any, tolerance: float, text: str) -> float:
    """Fail the section unless tensors are close, and return their largest difference, relative to the largest value."""
    worst = 0.0
    for one, other in zip(actual, expected, strict=True):
        scale = max(other.abs().max().item(), 1e-6)
        worst = max(worst, (one.double() - other.double()).abs().max().item() / scale)
    require(worst <= tolerance, f"{text}: {worst:.3g} away, relative to the largest value")
    return worst


def dist_world_size() -> int:
    """Return the number of ranks of this section."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_mesh(**sizes: int) -> NamedMesh:
    """Return a mesh on the device: NCCL with one rank, gloo if two ranks share it."""
    import namedmesh

    backend = "nccl" if ON_GPU and dist_world_size() == 1 else "gloo"
    device = "cuda:0" if ON_GPU else "cpu"
    if not dist.is_initialized():
        if ON_GPU:
            torch.cuda.set_device(0)
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return namedmesh.init_mesh(sizes, device=device)


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def median_ms(step: Callable[[], object], *, rounds: int = 20, warm: int = 5) -> float:
    """Return the median time of a step in milliseconds, with the device's work."""
    times = []
    for _ in range(warm + rounds):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    times = sorted(times[warm:])
    return round(times[len(times) // 2] * 1e3, 3)


def count_kernels(step: Callable[[], object]) -> int:
    """Return how many kernels a step launches; on a CPU, how many operations it dispatches."""
    from torch.profiler import ProfilerActivity, profile

    step()
    if ON_GPU:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            step()
            synchronize()
        kinds = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return len([event for event in kinds if "Memcpy" not in event.name and "Memset" not in event.name])

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += 1
            return func(*args, **(kwargs or {}))

    counted: Any = Count()  # type: ignore[no-untyped-call]  # torch's
    with counted:
        step()
    return int(counted.number)


def mlp(features: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a small network with a norm that no plan shards; the same on every rank."""
    torch.manual_seed(0)
    layers = [
        nn.LayerNorm(features),
        nn.Linear(features, 4 * features),
        nn.GELU(),
        nn.Linear(4 * features, features),
    ]
    return nn.Sequential(*layers).to(DEVICE, dtype)


def mlp_plan() -> dict[str, Any]:
    """Return the plan that shards it."""
    from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel

    return {"1": ColwiseParallel(), "3": RowwiseParallel()}


class CountReads(TorchDispatchMode):
    """Count what would wait for a GPU: reads of values, and tensors that are made from Python values.

    It stands for the warnings of torch on a CPU, on which nothing waits.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.number += func in {aten._local_scalar_dense.default, aten.lift_fresh.default}  # noqa: SLF001
        return func(*args, **(kwargs or {}))


def count_synchronizations(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a function, and how often it waits for the device."""
    if not ON_GPU:
        counter: Any = CountReads()
        # Values on the CPU are checked by the host, which reads them.
        with counter, mock.patch.object(Tensor, "is_cpu", new=False):
            result = function()
        return result, counter.number
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return result, len([warning for warning in seen if "synchronizing" in str(warning.message)])


def full(tensor: Any) -> Any:
    """Return the whole tensor behind a DTensor."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


# --- part A: one process, NCCL -------------------------------------------------------------------------------


def marked_tests() -> dict[str, Any]:
    """Run the tests that are marked ``gpu``."""
    require_gpu()
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise SkippedError(f"it needs {' and '.join(missing)}")
    files = sorted(
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")
    )
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "-W", "default"]
    done = subprocess.run([*words, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    lines = done.stdout.strip().splitlines()
    require(done.returncode == 0, "\n".join(lines[-30:]) + done.stderr[-2000:])
    return {"pytest": lines[-1]}


def collectives() -> dict[str, Any]:
    """Functional collectives in three types, and captured in a CUDA graph and replayed."""
    from namedmesh._torch.tensors import run_functional_collective

    mesh = make_mesh(dp=-1)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]  # it exists
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.arange(8, device=mesh.device).to(dtype)
        results = [
            run_functional_collective("all_reduce", x, "sum", name),
            run_functional_collective("all_gather_into_tensor", x, 1, name),
            run_functional_collective("reduce_scatter_tensor", x, "sum", 1, name),
        ]
        if ON_GPU:
            results.append(run_functional_collective("all_to_all_single", x, [8], [8], name))
        for result in results:
            require(torch.equal(result, x), f"a collective over one rank changed {dtype}")
    figures: dict[str, Any] = {"types": 3, "captured": False}
    if ON_GPU:
        given = torch.ones(8, device=mesh.device)
        run_functional_collective("all_reduce", given, "sum", name)
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_functional_collective("all_reduce", given, "sum", name) * 2
        given.fill_(3)
        graph.replay()
        synchronize()
        require(torch.equal(captured, torch.full_like(captured, 6)), "a replayed all-reduce has old values")
        figures["captured"] = True
    return figures


def options() -> dict[str, Any]:
    """NCCL options, read back from the communicator of a group that has them."""
    require_gpu()
    from namedmesh.mesh.options import GroupOptions, make_group_arguments

    mesh = make_mesh(dp=-1)
    arguments = make_group_arguments(GroupOptions(nccl={"max_ctas": 4}, high_priority=True))
    group: Any = dist.new_group([0], **arguments)
    dist.all_reduce(torch.ones(1, device=mesh.device), group=group)
    made = group._get_backend(mesh.device).options  # noqa: SLF001  torch has no public way to read them
    require(made.config.max_ctas == 4, f"max_ctas is {made.config.max_ctas}")  # noqa: PLR2004  as asked for
    require(made.is_high_priority_stream, "the stream has no high priority")
    return {"max_ctas": made.config.max_ctas, "high_priority": made.is_high_priority_stream}


class ParallelModel(nn.Module):
    """A layer of each kind that a plan makes, with the shared rows of ``KeyValueParallel``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.keys = nn.Linear(32, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        x = x + self.keys(x)
        logits: Tensor = self.head(x + self.down(nn.functional.gelu(self.up(x))))
        return logits


class Experts(nn.Module):
    """Four experts, each with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 256).view(4, 8, 8))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        expert = torch.arange(len(counts), device=tokens.device)
        expert = expert.repeat_interleave(counts, output_size=len(tokens))
        return torch.einsum("ti,tij->tj", tokens, self.weight[expert])


def synchronizations() -> dict[str, Any]:
    """The calls of a training step, counted for synchronizations with the host, in a step that compares nothing."""
    from torch.distributed.tensor import Replicate

    from namedmesh import training
    from namedmesh.tensor_parallel import (
        ColwiseParallel,
        ExpertParallel,
        RowwiseParallel,
        cross_entropy,
        parallelize,
        reduce_gradients,
    )

    mesh = make_mesh(dp=-1, tp=1)
    mesh.add_view("expert", edp=-1, ep=1)
    model: Any = ParallelModel().to(mesh.device)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "keys": ColwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(),
    }
    parallelize(model, mesh["tp"], plan)
    # As on a rank of KeyValueParallel that has head 0 twice, and not head 1.
    model.keys.rows = ((0, 16), (0, 16))
    experts: Any = parallelize(Experts().to(mesh.device), mesh["ep"], ExpertParallel(mesh))
    params = [*model.parameters(), *experts.parameters()]
    optimizer = torch.optim.AdamW(params, fused=True)
    ids = torch.arange(32, device=mesh.device).view(4, 8)
    mask = torch.ones(4, 8, dtype=torch.bool, device=mesh.device)
    # Equal rows would be compared again in each forward: they say nothing about the samples.
    rows = torch.linspace(-1, 1, 64, device=mesh.device).view(8, 8)
    counts = torch.full((4,), 2, device=mesh.device)
    found: dict[str, int] = {}

    def measure(call: str, function: Callable[[], Any]) -> Any:
        result, found[call] = count_synchronizations(function)
        return result

    def compute_loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), ids.flatten(), mesh["tp"], reduction="sum")

    for _ in range(5):  # calls 1, 2 and 4 compare, and the last one does not
        tokens = measure("count_tokens", partial(training.count_tokens, mask, mesh))
        logits = measure("forward", partial(model, ids))
        loss_sum = measure("cross_entropy", partial(compute_loss, logits))
        output = measure("forward of experts", partial(experts, rows, counts))
        loss_sum = loss_sum + output.square().sum()
        loss = measure("normalize_loss", partial(training.normalize_loss, loss_sum, tokens, mesh))
        measure("backward", loss.backward)
        measure("reduce_gradients", partial(reduce_gradients, params))
        measure("clip_grad_norm_", partial(training.clip_grad_norm_, params, 1.0, mesh))
        measure("optimizer.step", optimizer.step)
        measure("mean_loss", partial(training.mean_loss, loss, mesh))
        optimizer.zero_grad()
    # The sizes of an all-to-all must be known on the host.
    allowed = {"forward of experts": 1}
    wrong = {call: number for call, number in found.items() if number > allowed.get(call, 0)}
    require(not wrong, f"calls that wait for the device: {wrong}")
    return {"synchronizations": found, "measured": ON_GPU}


def kernels() -> dict[str, Any]:
    """Kernels and time of clipping, for 300 gradients, beside torch's."""
    from namedmesh import training

    mesh = make_mesh(dp=-1)
    figures: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        params = [nn.Parameter(torch.ones(1024, device=mesh.device, dtype=dtype)) for _ in range(300)]
        for param in params:
            param.grad = torch.ones_like(param)
        ours = partial(training.clip_grad_norm_, params, 1.0, mesh)
        theirs = partial(torch.nn.utils.clip_grad_norm_, params, 1.0, foreach=True)
        for _ in range(3):
            ours()
        # Call 4 compares; the two after it do not.
        ours()
        counts = {"namedmesh": count_kernels(ours), "torch": count_kernels(theirs)}
        times = {"namedmesh_ms": median_ms(ours), "torch_ms": median_ms(theirs)}
        figures[str(dtype)] = counts | times
        require(counts["namedmesh"] <= 3 * counts["torch"] + 20, f"too many kernels: {counts}")
    return figures


def checkpoints() -> dict[str, Any]:
    """Save and load some gigabytes, synchronously and in the background."""
    from namedmesh import training

    mesh = make_mesh(dp=-1)
    layers = 32 if ON_GPU else 2
    width = 4096 if ON_GPU else 64
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=mesh.device) for _ in range(layers)))
    wanted = [param.detach().clone() for param in model.parameters()]
    megabytes = sum(param.nbytes for param in wanted) / 2**20
    figures: dict[str, Any] = {"megabytes": round(megabytes)}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        training.save(f"{folder}/sync", mesh, model).result()
        figures["save_s"] = round(time.perf_counter() - start, 2)
        start = time.perf_counter()
        future = training.save(f"{folder}/background", mesh, model, async_=True)
        figures["background_blocks_s"] = round(time.perf_counter() - start, 2)
        # The next step changes the parameters while the files are written.
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
        future.result()
        figures["background_s"] = round(time.perf_counter() - start, 2)
        for name in ("sync", "background"):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            start = time.perf_counter()
            training.load(f"{folder}/{name}", mesh, model)
            figures["load_s"] = round(time.perf_counter() - start, 2)
            for param, value in zip(model.parameters(), wanted, strict=True):
                require(torch.equal(param, value), f"the {name} checkpoint has other values")
    return figures


# --- part B: two gloo ranks on one device --------------------------------------------------------------------


def optimizers() -> dict[str, Any]:
    """Optimizers of torch, and its clipping, after tensor parallelism alone, beside one process."""
    from namedmesh.tensor_parallel import parallelize

    mesh = make_mesh(tp=2)
    kinds: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": torch.optim.AdamW,
        "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
        "AdamW fused": partial(torch.optim.AdamW, fused=True),
        "SGD momentum foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        "Adagrad foreach": partial(torch.optim.Adagrad, foreach=True),
    }
    x = torch.linspace(-1, 1, 4 * 16, device=mesh.device).view(4, 16)
    worst = 0.0
    for name, kind in kinds.items():
        results = []
        for sharded in (False, True):
            model: nn.Module = mlp(16)
            if sharded:
                parallelize(model, mesh["tp"], mlp_plan())
            optimizer = kind(model.parameters())
            for _ in range(3):
                model(x).square().sum().backward()
                norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
            results.append([norm, *(full(param) for param in model.parameters())])
        for one, other in zip(*results, strict=True):
            worst = max(worst, (one - other).abs().max().item())
        require(worst < 1e-4, f"{name} is {worst} away from one process")  # noqa: PLR2004  float32 over three steps
    return {"optimizers": list(kinds), "largest_difference": worst}


def random_numbers() -> dict[str, Any]:
    """The seeds of data-parallel ranks stay different after a random operation on a DTensor."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    from namedmesh import training

    mesh = make_mesh(dp=2, tp=1)
    training.seed_all(0, mesh)
    sharded = distribute_tensor(torch.ones(8, device=mesh.device), mesh["dp"], [Replicate()])
    torch.nn.functional.dropout(sharded, 0.5)
    own = torch.rand(1, device=mesh.device).cpu()
    drawn = [torch.empty(1) for _ in range(2)]
    dist.all_gather(drawn, own)
    require(drawn[0] != drawn[1], "both data-parallel ranks draw the same numbers")
    return {"drawn": [round(value.item(), 4) for value in drawn]}


def second_mesh() -> dict[str, Any]:
    """A mesh with the same names after ``close()``: DTensor's caches of autograd's thread, too."""
    from namedmesh.tensor_parallel import parallelize

    losses = []
    for _ in range(2):
        mesh = make_mesh(dp=1, tp=2)
        model = mlp(16)
        parallelize(model, mesh["tp"], mlp_plan())
        x = torch.ones(4, 16, device=mesh.device, requires_grad=True)
        loss = model(x).square().sum()
        loss.backward()
        full(model[1].weight.grad)
        losses.append(loss.item())
        mesh.close()
    require(losses[0] == losses[1], f"the losses differ: {losses}")
    return {"loss": losses[0]}


def captured_step() -> dict[str, Any]:
    """An optimizer step after tensor parallelism, captured in a CUDA graph as step 4."""
    from namedmesh.tensor_parallel import parallelize

    require_gpu()
    mesh = make_mesh(tp=2)
    model = mlp(16)
    parallelize(model, mesh["tp"], mlp_plan())
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x = torch.ones(4, 16, device=mesh.device)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
    before = full(model[0].weight).clone()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    synchronize()
    require(not torch.equal(before, full(model[0].weight)), "the replayed step changed nothing")
    return {"captured": True}


def gradient_scaler() -> dict[str, Any]:
    """Tensor-parallel ranks skip the same steps, although one rank's shard alone has overflowed."""
    from namedmesh.tensor_parallel import parallelize

    mesh = make_mesh(tp=2)
    model: Any = parallelize(mlp(16), mesh["tp"], mlp_plan())
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=1000)
    x = torch.ones(4, 16, device=mesh.device)
    scales = []
    for step in range(3):
        model.zero_grad()
        scaler.scale(model(x).square().sum()).backward()
        if step == 1 and mesh.rank("tp") == 1:
            model[1].weight.grad.to_local().fill_(torch.inf)
        before = model[1].weight.to_local().clone()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(before, model[1].weight.to_local())
        require(moved == (step != 1), f"rank {mesh.rank('tp')} took step {step}: {moved}")
        scales.append(scaler.get_scale())
    require(scales == [8.0, 4.0, 4.0], f"the scales are {scales}")
    return {"scales": scales}


def streams_in_a_capture() -> dict[str, Any]:
    """``rng_stream`` inside a CUDA graph capture is an error that says so, and the capture ends in order."""
    from namedmesh import TrainingError, training

    require_gpu()
    mesh = make_mesh(dp=-1)
    training.seed_all(0, mesh)
    with training.rng_stream("tensor"):
        before = torch.rand(4, device=mesh.device)
    graph = torch.cuda.CUDAGraph()
    text = ""
    with torch.cuda.graph(graph):
        doubled = before * 2
        try:
            with training.rng_stream("tensor"):
                torch.rand(4, device=mesh.device)
        except TrainingError as error:
            text = str(error)
    graph.replay()
    synchronize()
    require("CUDA graph" in text, "streams was entered while a graph was captured")
    require(torch.equal(doubled, before * 2), "the graph that was captured around it is wrong")
    return {"error": text[:100]}


def out_of_vocabulary() -> dict[str, Any]:
    """An id outside of the vocabulary is an error on the device, and does not count as zeros."""
    from torch.distributed.tensor import Replicate

    from namedmesh.tensor_parallel import RowwiseParallel, parallelize

    mesh = make_mesh(tp=2)
    model = nn.Sequential(nn.Embedding(8, 4)).to(DEVICE)
    parallelize(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
    try:
        model(torch.tensor([1, 9], device=mesh.device)).sum().item()
    except (IndexError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]}
    raise AssertionError("id 9 of a vocabulary of 8 went through")


class AttentionCase(NamedTuple):
    """A case of attention; ``efficient`` is for the kernel that float32 takes on CUDA."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_causal: bool = True


def attention() -> dict[str, Any]:
    """``context_attention`` over two ranks, beside attention over the full sequence: values, gradients, time, memory."""
    from namedmesh import training

    mesh = make_mesh(cp=2)
    length = 1024 if ON_GPU else 64
    half = torch.bfloat16 if ON_GPU else torch.float64
    cases = {
        "flash": AttentionCase(8, 8, 64, half),
        "grouped queries": AttentionCase(8, 2, 64, half),
        "padded heads": AttentionCase(4, 4, 80, half),
        "efficient": AttentionCase(4, 4, 64, torch.float32),
        "full": AttentionCase(4, 4, 64, half, is_causal=False),
    }
    figures: dict[str, Any] = {"length": length}
    for name, case in cases.items():
        # One ulp of bfloat16 is 2**-8 of a value; the sums over a sequence have several roundings.
        tolerance = {torch.bfloat16: 0.03, torch.float32: 1e-4, torch.float64: 1e-10}[case.dtype]
        figures[name] = compare_attention(mesh, case, length, tolerance)
    query = torch.randn(1, 8, 8 * length, 64, device=mesh.device, dtype=half)
    q, k, v = (
        shard.requires_grad_()
        for shard in training.shard_sequence(query, query, query, mesh=mesh["cp"], dim=2)[:3]
    )

    def step() -> None:
        training.context_attention(q, k, v, mesh["cp"]).sum().backward()

    figures["step_ms"] = median_ms(step, rounds=5, warm=2)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        figures["peak_megabytes"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return figures


def compare_attention(mesh: NamedMesh, case: AttentionCase, length: int, tolerance: float) -> float:
    """Compare output and gradients of one case with attention over the full sequence in float64."""
    from namedmesh import training

    torch.manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shape = (length, case.head_dim)
    drawn = [torch.randn(1, count, *shape, device=mesh.device).to(case.dtype) for count in heads]
    *inputs, grad = drawn
    exact: list[Any] = [tensor.double().clone().requires_grad_() for tensor in inputs]
    attend: Any = nn.functional.scaled_dot_product_attention
    output = attend(*exact, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads)
    output.backward(grad.double())
    wanted: list[Any] = [output.detach(), *(tensor.grad for tensor in exact)]
    shard = partial(training.shard_sequence, mesh=mesh["cp"], dim=2)
    local: list[Any] = [tensor.requires_grad_() for tensor in shard(*inputs)[:3]]
    query, key, value = local
    got = training.context_attention(query, key, value, mesh["cp"], is_causal=case.is_causal)
    got.backward(shard(grad)[0])
    actual = [got.detach(), *(tensor.grad for tensor in local)]
    return require_close(actual, shard(*wanted)[:4], tolerance, f"attention, {case}")


def tensor_parallel_steps() -> dict[str, Any]:
    """Steps of MLP blocks in bfloat16: ours, torch's styles, and the least that tensor parallelism takes by hand."""
    from torch.distributed.tensor import parallel

    from namedmesh.tensor_parallel import parallelize

    mesh = make_mesh(tp=2)
    sizes = (1024, 2048, 4096, 8192) if ON_GPU else (32,)
    figures: dict[str, Any] = {}
    for features in sizes:
        torchs = {"1": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
        models: dict[str, nn.Module] = {
            "namedmesh": parallelize(mlp(features, torch.bfloat16), mesh["tp"], mlp_plan()),
            "torch": parallel.parallelize_module(mlp(features, torch.bfloat16), mesh["tp"], torchs),
            "by hand": _by_hand(features, mesh),
        }
        torch.manual_seed(1)
        x = torch.randn(
            512 if ON_GPU else 4, features, device=mesh.device, dtype=torch.bfloat16, requires_grad=True
        )
        require_equal_models(models, mlp(features, torch.bfloat16), x)
        times = {}
        for name, model in models.items():

            def step(model: nn.Module = model, x: Tensor = x) -> None:
                model.zero_grad()
                model(x).square().mean().backward()

            times[name] = median_ms(step, rounds=10, warm=3)
        figures[str(features)] = times
    return figures


def require_equal_models(models: Mapping[str, nn.Module], reference: nn.Module, x: Tensor) -> None:
    """Fail the section unless the outputs and input gradients of sharded models are those of one process."""
    results = []
    for model in (reference, *models.values()):
        output = model(x)
        (grad,) = torch.autograd.grad(output.square().mean(), x)
        results.append([full(output), grad])
    for name, result in zip(models, results[1:], strict=True):
        require_close(result, results[0], 0.05, f"{name} in bfloat16")


class _CopyToRegion(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromRegion(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # noqa: ARG004  autograd's signature
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004  autograd's signature
        return grad, None


class _ByHand(nn.Module):
    def __init__(self, features: int, mesh: NamedMesh) -> None:
        super().__init__()
        whole: Any = mlp(features, torch.bfloat16)
        self.group = mesh.group("tp")
        self.norm = whole[0]
        rows = whole[1].weight.chunk(2, 0)[mesh.rank("tp")]
        columns = whole[3].weight.chunk(2, 1)[mesh.rank("tp")]
        self.up = nn.Parameter(rows.detach().clone())
        self.down = nn.Parameter(columns.detach().clone())
        self.up_bias = nn.Parameter(whole[1].bias.chunk(2)[mesh.rank("tp")].detach().clone())
        self.down_bias = whole[3].bias

    def forward(self, x: Tensor) -> Tensor:
        entered: Tensor = _CopyToRegion.apply(self.norm(x), self.group)  # type: ignore[no-untyped-call]
        hidden = nn.functional.gelu(nn.functional.linear(entered, self.up, self.up_bias))
        summed: Tensor = _ReduceFromRegion.apply(nn.functional.linear(hidden, self.down), self.group)  # type: ignore[no-untyped-call]
        output: Tensor = summed + self.down_bias
        return output


def _by_hand(features: int, mesh: NamedMesh) -> nn.Module:
    return _ByHand(features, mesh)


# --- one rank on a GPU, several on a CPU -----------------------------------------------------------------------


def fsdp() -> dict[str, Any]:
    """FSDP2 over tensor parallelism: losses, gradient norms and parameters of three steps, beside one process."""
    from torch.distributed.fsdp import fully_shard

    from namedmesh import training
    from namedmesh.tensor_parallel import parallelize

    size = 2 if dist_world_size() > 1 else 1
    mesh = make_mesh(dp=size, tp=size)
    batch = torch.linspace(-1, 1, 8 * 16, device=mesh.device).view(8, 16)
    results = []
    for sharded in (False, True):
        model: Any = mlp(16)
        x = batch
        if sharded:
            parallelize(model, mesh["tp"], mlp_plan())
            fully_shard(model, mesh=training.fsdp_mesh(mesh))
            x = batch.chunk(size)[mesh.rank("dp")]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        values = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            if sharded:
                values.append(training.clip_grad_norm_(model.parameters(), 1.0, mesh))
                values.append(training.mean_loss(loss, mesh))
            else:
                values.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                values.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        results.append([*map(full, values), *(full(param) for param in model.parameters())])
    worst = require_close(results[1], results[0], 1e-4, "FSDP2 over tensor parallelism")
    return {"ranks": size * size, "largest_difference": worst}


def pipeline() -> dict[str, Any]:
    """The loss and the gradients of a pipeline's step, beside one process."""
    from namedmesh import training

    mesh = make_mesh(pp=-1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    whole = nn.Sequential(*layers).to(mesh.device)
    x = torch.linspace(-1, 1, 8 * 16, device=mesh.device).view(8, 16)
    loss = nn.functional.mse_loss(whole(x), x)
    loss.backward()
    names = [int(name) for name in training.stage_layers(layers, mesh)]
    wanted = [
        param.grad.clone() for name in names for param in layers[name].parameters() if param.grad is not None
    ]
    whole.zero_grad()
    stage = nn.Sequential(*(layers[name] for name in names))
    pipe = training.Pipeline(stage, mesh, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    found = training.mean_loss(pipe.step(x, target=x), mesh)
    grads = [param.grad for param in stage.parameters()]
    worst = require_close([found, *grads], [loss.detach(), *wanted], 1e-5, "the pipeline")
    return {"stages": mesh.size("pp"), "largest_difference": worst}


def experts() -> dict[str, Any]:
    """Outputs and gradients of sharded experts, beside all experts on each rank."""
    from namedmesh.tensor_parallel import ExpertParallel, parallelize

    ranks = dist_world_size()
    mesh = make_mesh(dp=ranks)
    mesh.add_view("expert", edp=1, ep=ranks)
    replicated = Experts().to(mesh.device)
    sharded: Any = parallelize(Experts().to(mesh.device), mesh["ep"], ExpertParallel(mesh))
    counts = torch.tensor([3, 1, 0, 4], device=mesh.device)
    results = []
    for model in (replicated, sharded):
        torch.manual_seed(mesh.rank("dp"))
        tokens = torch.randn(8, 8).to(mesh.device).requires_grad_()
        output = model(tokens, counts)
        output.square().sum().backward()
        results.append([output.detach(), tokens.grad])
    # The gradient of an expert is averaged over all ranks, as the gradients of everything else.
    grad: Any = replicated.weight.grad
    dist.all_reduce(grad)
    results[0].append(grad / ranks)
    results[1].append(full(sharded.weight.grad))
    return {"ranks": ranks, "largest_difference": require_close(results[1], results[0], 1e-5, "experts")}


def compiled() -> dict[str, Any]:
    """A tensor-parallel model under torch.compile, beside the same model without it."""
    from namedmesh.tensor_parallel import parallelize

    mesh = make_mesh(tp=2)
    backend = "inductor" if ON_GPU else "aot_eager"
    x = torch.linspace(-1, 1, 4 * 16, device=mesh.device).view(4, 16)
    results = []
    for is_compiled in (False, True):
        model: Any = parallelize(mlp(16), mesh["tp"], mlp_plan())
        run = torch.compile(model, backend=backend, fullgraph=True) if is_compiled else model
        for _ in range(2):
            model.zero_grad()
            output = run(x)
            output.square().sum().backward()
        results.append([output.detach(), *(full(param.grad) for param in model.parameters())])
    worst = require_close(results[1], results[0], 1e-4, "the compiled model")
    return {"backend": backend, "largest_difference": worst}


def doctor() -> dict[str, Any]:
    """The doctor on the backend of the device."""
    from contextlib import redirect_stdout
    from io import StringIO

    from namedmesh.__main__ import main as run_command

    printed = StringIO()
    with redirect_stdout(printed):
        status = run_command(["doctor", "dp=-1", "--device", DEVICE])
    require(status == 0, f"its exit status is {status}")
    if os.environ.get("RANK", "0") == "0":
        require("gives the right sum" in printed.getvalue(), printed.getvalue())
    return {"printed": printed.getvalue().partition("\n")[0]}


SECTIONS: dict[str, Section] = {
    "marked tests": Section(marked_tests, 1, 90),
    "collectives": Section(collectives, 1, 40),
    "options": Section(options, 1, 40),
    "synchronizations": Section(synchronizations, 1, 40),
    "kernels": Section(kernels, 1, 60),
    "checkpoints": Section(checkpoints, 1, 90),
    "FSDP2 with TP": Section(fsdp, 1, 40, cpu_ranks=4),
    "pipeline": Section(pipeline, 1, 40, cpu_ranks=2),
    "experts": Section(experts, 1, 40, cpu_ranks=2),
    "doctor": Section(doctor, 1, 40, cpu_ranks=2),
    "optimizers": Section(optimizers, 2, 60),
    "random numbers": Section(random_numbers, 2, 40),
    "second mesh": Section(second_mesh, 2, 40),
    "captured step": Section(captured_step, 2, 40),
    "streams in a capture": Section(streams_in_a_capture, 1, 40),
    "gradient scaler": Section(gradient_scaler, 2, 40),
    "attention": Section(attention, 2, 60),
    "compile": Section(compiled, 2, 90),
    "tensor-parallel steps": Section(tensor_parallel_steps, 2, 90),
    # Last: a device-side assertion ends the process's use of the device.
    "out of vocabulary": Section(out_of_vocabulary, 2, 40, may_abort=True),
}
# A CPU may be busy with other work, and is not paid by the minute.
_TIME_LIMIT = 480 if ON_GPU else 3600
_PATIENCE = 1 if ON_GPU else 10
# How long the other ranks of a section may take once one of them has failed.
_GRACE_SECONDS = 10
_LOST_PEER = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed", "Timed out waiting")


def run_section(name: str) -> dict[str, Any]:
    """Run a section in this process, and return its result."""
    start = time.perf_counter()
    result: dict[str, Any] = {"section": name}
    try:
        figures = SECTIONS[name].run()
        result |= {"result": "PASS", "figures": figures}
    except SkippedError as error:
        result |= {"result": "SKIP", "why": str(error)}
    except Exception as error:  # noqa: BLE001  the other sections go on
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        result |= {"result": "FAIL", "why": f"{type(error).__name__}: {error}"[:2000], "traceback": where}
    result["seconds"] = round(time.perf_counter() - start, 1)
    result["ended"] = time.time()
    return result


def start_section(name: str, limit: float) -> dict[str, Any]:
    """Run a section in processes of its own, one for each rank, and return its result."""
    section = SECTIONS[name]
    start = time.perf_counter()
    limit = min(section.seconds * _PATIENCE, limit)
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        processes = [start_rank(name, rank, section.num_ranks, folder) for rank in range(section.num_ranks)]
        try:
            wait_for_ranks(processes, folder, limit)
            statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                # Each rank leads a group of processes: what it has started ends with it.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        results = read_results(folder)
        logs = [
            (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
            for rank in range(len(processes))
        ]
    if len(results) == len(processes) and not any(result["result"] == "FAIL" for result in results.values()):
        return results[0]
    seconds = round(time.perf_counter() - start, 1)
    if section.may_abort and not results and all("assert" in log.lower() for log in logs):
        return {
            "section": name,
            "result": "PASS",
            "figures": {"ended by": "an assertion"},
            "seconds": seconds,
        }
    causes = find_causes(results, statuses, logs, limit)
    return {"section": name, "result": "FAIL", "why": causes[0], "all": causes, "seconds": seconds}


def start_rank(name: str, rank: int, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank of a section, which leaves its output and its result in a folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        _RESULTS: str(folder),
    }
    if ranks > 1:
        port = folder / "port"
        if not port.exists():
            with socket.create_server(("127.0.0.1", 0)) as server:
                port.write_text(str(server.getsockname()[1]), encoding="utf-8")
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.read_text(encoding="utf-8")}
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603  our own words
            [sys.executable, str(SCRIPT), "--section", name],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for_ranks(processes: list[subprocess.Popen[bytes]], folder: Path, limit: float) -> None:
    """Wait until all ranks have ended; only for a while once one of them has failed."""
    deadline = time.monotonic() + limit
    has_failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        results = read_results(folder)
        for rank, process in enumerate(processes):
            is_dead = process.poll() is not None and rank not in results
            is_failed = rank in results and results[rank]["result"] == "FAIL"
            if (is_dead or is_failed) and not has_failed:
                has_failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.1)


def read_results(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the results that ranks have written, by rank."""
    files = sorted(folder.glob("*.json"))
    return {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in files}


def find_causes(
    results: Mapping[int, dict[str, Any]], statuses: list[int | None], logs: list[str], limit: float
) -> list[str]:
    """Return why each rank has failed, the likely cause first: the error of a lost peer is a consequence."""
    found = []
    for rank, status in enumerate(statuses):
        result = results.get(rank)
        if result is not None and result["result"] != "FAIL":
            continue
        if result is not None:
            is_consequence = any(words in result["why"] for words in _LOST_PEER)
            found.append((3 if is_consequence else 0, result["ended"], f"rank {rank}: {result['why']}"))
        elif status is None:
            found.append((2, 0.0, f"rank {rank}: no result within {limit:.0f} s: {logs[rank][-500:]}"))
        else:
            found.append((1, 0.0, f"rank {rank}: exit status {status}: {logs[rank][-1500:]}"))
    return [text for _, _, text in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check namedmesh on one GPU.")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help="run these sections only"
    )
    parser.add_argument("--output", type=Path, help="a file for the JSON summary")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        run_rank(arguments.section)
    deadline = time.monotonic() + _TIME_LIMIT
    results = []
    for name in arguments.only or SECTIONS:
        left = deadline - time.monotonic()
        if left > 0:
            result = start_section(name, left)
        else:
            result = {"section": name, "result": "SKIP", "why": f"{_TIME_LIMIT} s are over", "seconds": 0.0}
        results.append(result)
        detail = result.get("why") or json.dumps(result.get("figures"))
        line = " ".join(f"{result['result']} {name:24} {result['seconds']:6.1f} s  {detail}".split(" "))
        print(line.replace("\n", " ")[:300], flush=True)
    summary = {
        "device": torch.cuda.get_device_name(0) if ON_GPU else "no GPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "sections": results,
    }
    text = json.dumps(summary, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    counts = {word: [result["result"] for result in results].count(word) for word in ("PASS", "SKIP", "FAIL")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts["FAIL"] else 0


def run_rank(section: str) -> None:
    """Run a section as one of its ranks, write the result, and end the process."""
    result = run_section(section)
    file = Path(os.environ[_RESULTS], f"{os.environ.get('RANK', '0')}.json")
    # The parent must not read a file that is half written.
    file.with_suffix(".part").write_text(json.dumps(result), encoding="utf-8")
    file.with_suffix(".part").rename(file)
    if result["result"] == "PASS" and dist.is_initialized() and not SECTIONS[section].may_abort:
        dist.barrier()  # a rank that ends takes its connections from the other
    # No destructor of a group waits for a peer that failed, or closes a context that an assertion broke.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
