"""Check namedmesh on one GPU, in at most eight minutes: correctness first, then speed.

    python benchmarks/gpu_check.py [--only SECTION ...] [--output FILE]

Part A runs in one process with NCCL, part B in two gloo ranks that share the GPU (NCCL refuses two ranks on
one device). Every section is a process of its own with a time limit, so that a hang or a device-side assertion
ends one section and not the check. Without a GPU the sections run on the CPU as far as they can, with small
sizes, and those that cannot are named. It needs no installation: `PYTHONPATH=src` is set here.

It prints a line for each section and a JSON summary, which `--output` also writes to a file. The exit status is 1
if a section failed, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from namedmesh import NamedMesh

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
_RESULTS = "GPU_CHECK_RESULTS"  # the folder in which every rank of a section leaves its result


class SkippedError(Exception):
    """A section cannot run here; the text says why."""


class Section(NamedTuple):
    """One section: its function returns figures, and raises if something is wrong.

    Attributes:
        run: the function; it is called in a process of its own.
        ranks: 1 for part A, 2 for part B (gloo ranks on one device).
        seconds: the time limit.
    """

    run: Callable[[], dict[str, Any]]
    ranks: int
    seconds: int


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


def make_mesh(**sizes: int) -> NamedMesh:
    """Return a mesh on the device: NCCL with one rank, gloo if two ranks share it."""
    import namedmesh

    backend = "nccl" if ON_GPU and int(os.environ.get("WORLD_SIZE", "1")) == 1 else "gloo"
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
    from torch.utils._python_dispatch import TorchDispatchMode

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
        path for path in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")
    )
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "-W", "default"]
    done = subprocess.run([*words, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    lines = done.stdout.strip().splitlines()
    require(done.returncode == 0, "\n".join(lines[-30:]) + done.stderr[-2000:])
    return {"pytest": lines[-1]}


def collectives() -> dict[str, Any]:
    """Functional collectives in three types, and captured in a CUDA graph and replayed."""
    from namedmesh._torch import run_functional_collective

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
    from namedmesh.options import GroupOptions, make_group_arguments

    mesh = make_mesh(dp=-1)
    arguments = make_group_arguments(GroupOptions(nccl={"max_ctas": 4}, high_priority=True))
    group: Any = dist.new_group([0], **arguments)
    dist.all_reduce(torch.ones(1, device=mesh.device), group=group)
    made = group._get_backend(mesh.device).options  # noqa: SLF001  torch has no public way to read them
    require(made.config.max_ctas == 4, f"max_ctas is {made.config.max_ctas}")  # noqa: PLR2004  as asked for
    require(made.is_high_priority_stream, "the stream has no high priority")
    return {"max_ctas": made.config.max_ctas, "high_priority": made.is_high_priority_stream}


def synchronizations() -> dict[str, Any]:
    """A training step whose calls are counted for synchronizations with the host, outside compared steps."""
    import warnings

    from namedmesh import training

    mesh = make_mesh(dp=-1)
    model = mlp(64)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 64, device=mesh.device)
    mask = torch.ones(8, 64, dtype=torch.bool, device=mesh.device)
    found: dict[str, int] = {}

    def measure(call: str, function: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = function()
        found[call] = len([one for one in seen if "synchronizing" in str(one.message)])
        return result

    for step in range(3):
        is_last = step == 2  # noqa: PLR2004  calls 1 and 2 compare
        if ON_GPU and is_last:
            torch.cuda.set_sync_debug_mode("warn")
        tokens = measure("count_tokens", partial(training.count_tokens, mask, mesh))
        loss_sum = model(x).square().sum()
        loss = measure("normalize_loss", partial(training.normalize_loss, loss_sum, tokens, mesh))
        measure("backward", loss.backward)
        clip = partial(training.clip_grad_norm_, list(model.parameters()), 1.0, mesh)
        measure("clip_grad_norm_", clip)
        measure("optimizer.step", optimizer.step)
        measure("mean_loss", partial(training.mean_loss, loss, mesh))
        optimizer.zero_grad()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
    require(not any(found.values()), f"calls that wait for the device: {found}")
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
    """A mesh with the same names after ``close(destroy_groups=True)``: DTensor's caches of autograd's thread, too."""
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
        mesh.close(destroy_groups=True)
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


def attention() -> dict[str, Any]:
    """``context_attention`` over two ranks, beside attention over the full sequence: values, time and memory."""
    import torch.nn.functional as F  # noqa: N812  torch's own spelling

    from namedmesh import training

    mesh = make_mesh(cp=2)
    length = 8192 if ON_GPU else 64
    dtype = torch.bfloat16 if ON_GPU else torch.float64
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 8, length, 64, device=mesh.device, dtype=dtype) for _ in range(3))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    q, k, v, wanted, _ = training.shard_sequence(query, key, value, expected, mesh=mesh["cp"], dim=2)
    got = training.context_attention(q, k, v, mesh["cp"])
    far = (got - wanted).abs().max().item()
    require(far < (0.02 if ON_GPU else 1e-10), f"attention is {far} away from the full sequence")
    figures: dict[str, Any] = {"largest_difference": far, "length": length}
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def ours() -> None:
        training.context_attention(q, k, v, mesh["cp"]).sum().backward()

    figures["step_ms"] = median_ms(ours, rounds=5, warm=2)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours()
        figures["peak_megabytes"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return figures


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
        x = torch.randn(
            512 if ON_GPU else 4, features, device=mesh.device, dtype=torch.bfloat16, requires_grad=True
        )
        times = {}
        for name, model in models.items():

            def step(model: nn.Module = model, x: Tensor = x) -> None:
                model.zero_grad()
                model(x).square().mean().backward()

            times[name] = median_ms(step, rounds=10, warm=3)
        figures[str(features)] = times
    return figures


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


SECTIONS: dict[str, Section] = {
    "marked tests": Section(marked_tests, 1, 90),
    "collectives": Section(collectives, 1, 40),
    "options": Section(options, 1, 40),
    "synchronizations": Section(synchronizations, 1, 40),
    "kernels": Section(kernels, 1, 60),
    "checkpoints": Section(checkpoints, 1, 90),
    "optimizers": Section(optimizers, 2, 60),
    "random numbers": Section(random_numbers, 2, 40),
    "second mesh": Section(second_mesh, 2, 40),
    "captured step": Section(captured_step, 2, 40),
    "streams in a capture": Section(streams_in_a_capture, 1, 40),
    "gradient scaler": Section(gradient_scaler, 2, 40),
    "attention": Section(attention, 2, 60),
    "tensor-parallel steps": Section(tensor_parallel_steps, 2, 90),
    # Last: a device-side assertion ends the process's use of the device.
    "out of vocabulary": Section(out_of_vocabulary, 2, 40),
}
_TIME_LIMIT = 480


def run_section(name: str) -> dict[str, Any]:
    """Run a section in this process, and return its result."""
    start = time.perf_counter()
    result: dict[str, Any] = {"section": name}
    try:
        figures = SECTIONS[name].run()
        result |= {"result": "passed", "figures": figures}
    except SkippedError as error:
        result |= {"result": "skipped", "why": str(error)}
    except Exception as error:  # noqa: BLE001  the other sections go on
        result |= {"result": "failed", "why": f"{type(error).__name__}: {error}"[:2000]}
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def start_section(name: str, limit: float) -> dict[str, Any]:
    """Run a section in a process of its own, or in two ranks, and return the result of rank 0."""
    section = SECTIONS[name]
    words = [str(Path(__file__).resolve()), "--section", name]
    if section.ranks == 1:
        command = [sys.executable, *words]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*launcher, str(section.ranks), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    limit = min(section.seconds, limit)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment[_RESULTS] = folder
        why = ""
        try:
            done = subprocess.run(  # noqa: S603  our own words
                command, env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
            why = f"exit status {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            why = f"no result within {limit:.0f} s"
        files = sorted(Path(folder).iterdir())
        results: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for result in results:
        if result["result"] == "failed":
            return result
    if len(results) == section.ranks:
        return results[0]
    seconds = round(time.perf_counter() - start, 1)
    return {"section": name, "result": "failed", "why": why, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check namedmesh on one GPU.")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help="run these sections only"
    )
    parser.add_argument("--output", type=Path, help="a file for the JSON summary")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        result = run_section(arguments.section)
        rank = os.environ.get("RANK", "0")
        Path(os.environ[_RESULTS], f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
        if (
            result["result"] == "passed"
            and dist.is_initialized()
            and arguments.section != "out of vocabulary"
        ):
            dist.barrier()  # a rank that ends takes its connections from the other
        # No destructor of a group waits for a peer that failed, or closes a context that an assertion broke.
        os._exit(0)
    deadline = time.monotonic() + _TIME_LIMIT
    results = []
    for name in arguments.only or SECTIONS:
        result = start_section(name, max(5.0, deadline - time.monotonic()))
        results.append(result)
        detail = result.get("why") or json.dumps(result.get("figures"))
        print(f"{name:24} {result['result']:8} {result['seconds']:6.1f} s  {detail}", flush=True)
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
    return 1 if any(result["result"] == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
