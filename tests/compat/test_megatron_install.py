"""Megatron-core on our groups: installation and removal, and training of its own models."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
import warnings
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from installing import run_python
from megatron_newest import RELEASES, forget, put_first, release, without_triton
from ranks import live_groups, run_ranks, summed

import namedmesh
from namedmesh.compat import megatron
from namedmesh.compat.megatron import binding

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize("late", [False, True])
def test_with_megatron_core_its_own_modules_answer_from_our_meshes(late: bool) -> None:
    first = "import megatron.core.models.gpt.gpt_model\nfrom megatron.core import parallel_state as real\n"
    first += "from megatron.core.parallel_state import initialize_model_parallel, get_tensor_model_parallel_group\n"
    first += "theirs = initialize_model_parallel\n"
    code = "import sys, types, warnings\nwarnings.simplefilter('ignore')\n" + first * late
    code += textwrap.dedent("""
        import namedmesh
        from namedmesh.compat import megatron as ours
        ours.install()
        ours.install()
        from megatron.core import mpu, parallel_state
        from megatron.core.parallel_state import get_tensor_model_parallel_group, initialize_model_parallel
        import megatron.core.tensor_parallel.layers as layers
        assert mpu is parallel_state is ours.parallel_state is ours.mpu
        assert layers.get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
        namedmesh.launch.init("cpu")
        initialize_model_parallel(1)
        mesh = ours.current_mesh()
        group = get_tensor_model_parallel_group()
        assert group is mesh.group("tp") is ours.parallel_state.get_tensor_model_parallel_group()
        assert parallel_state._DATA_PARALLEL_GLOBAL_RANKS == [0]
        parallel_state._MPU_TENSOR_MODEL_PARALLEL_RANK = 7
        other = namedmesh.init_mesh(dp=1, cp=1, device="cpu")
        with other:
            assert not parallel_state.is_initialized()
            assert parallel_state._MPU_TENSOR_MODEL_PARALLEL_RANK is None
        assert parallel_state.get_tensor_model_parallel_rank() == 7
        parallel_state.destroy_model_parallel()
        assert mesh.closed and not parallel_state.is_initialized()
        initialize_model_parallel(1)
        ours.uninstall()
        assert not parallel_state.is_initialized() and ours.parallel_state is not parallel_state
        from megatron.core.parallel_state import initialize_model_parallel
        print(initialize_model_parallel.__module__, getattr(initialize_model_parallel, "__wrapped__", None))
    """)
    code += "assert initialize_model_parallel is theirs\n" * late
    assert run_python(code, action="ignore") == "megatron.core.parallel_state None\n"


@pytest.mark.parametrize("which", RELEASES)
def test_install_replaces_only_the_functions_that_make_and_destroy_groups(which: str) -> None:
    with release(which) as upstream:
        functions = {name: value for name, value in vars(upstream).items() if inspect.isfunction(value)}
        megatron.install()
        replaced = {name for name, value in functions.items() if getattr(upstream, name) is not value}
        assert replaced == {"initialize_model_parallel", "destroy_model_parallel"}
        megatron.uninstall()
        assert all(getattr(upstream, name) is value for name, value in functions.items())


OLD_FORK = """
import torch
_TENSOR_MODEL_PARALLEL_GROUP = None
_DATA_PARALLEL_GROUP = None
_MPU_RANK = None

def initialize_model_parallel(tensor_model_parallel_size_=1, pipeline_model_parallel_size_=1):
    global _TENSOR_MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP
    assert _DATA_PARALLEL_GROUP is None, "already initialized"
    t, world = tensor_model_parallel_size_, torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    for first in range(t):
        ranks = list(range(first, world, t))
        group = torch.distributed.new_group(ranks)
        if rank in ranks:
            _DATA_PARALLEL_GROUP = group
    for first in range(0, world, t):
        ranks = list(range(first, first + t))
        group = torch.distributed.new_group(ranks)
        if rank in ranks:
            _TENSOR_MODEL_PARALLEL_GROUP = group

def get_tensor_model_parallel_group():
    return _TENSOR_MODEL_PARALLEL_GROUP
"""


def _use_an_old_fork(folder: str) -> list[object]:
    """A vendored megatron/core from before create_group, without destroy_model_parallel."""
    forget()
    sys.path.insert(0, folder)
    megatron.install()
    from megatron.core import parallel_state

    before = live_groups()
    parallel_state.initialize_model_parallel(2)
    mesh = megatron.current_mesh()
    group = parallel_state.get_tensor_model_parallel_group()
    facts: list[object] = [group is mesh.group("tp"), parallel_state._DATA_PARALLEL_GROUP is mesh.group("dp")]
    facts += [live_groups() - before, summed(group)]
    megatron.uninstall()
    return [*facts, mesh.closed, parallel_state._DATA_PARALLEL_GROUP]


def test_a_vendored_fork_of_any_age_fills_its_own_variables_from_a_mesh(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").touch()
    (package / "parallel_state.py").write_text(OLD_FORK, encoding="utf-8")
    # The groups of tp, dp and the axes of size 1.
    expected: list[object] = [True, True, 3, 2.0, True, None]
    assert run_ranks(4, _use_an_old_fork, str(tmp_path)) == [expected] * 4


def _destroy_model_parallel() -> list[object]:
    from megatron.core import parallel_state

    mesh = namedmesh.init_mesh(
        dp=2, tp=2, timeout=timedelta(minutes=30)
    )  # Megatron's default, so that both share groups
    parallel_state.initialize_model_parallel(2)
    made = megatron.current_mesh()
    sizes: list[object] = []
    experts: Any = ModuleType("megatron.core.transformer.moe.fused_a2a")
    experts.nccl_ep_finalize = lambda: sizes.append(parallel_state.get_tensor_model_parallel_group().size())
    sys.modules[experts.__name__] = experts
    buffers = getattr(parallel_state, "SymmetricMemoryManager", SimpleNamespace(_buffers={}))._buffers
    buffers["tp"] = object()
    with megatron.bind(mesh):
        parallel_state.destroy_model_parallel()
        assert not parallel_state.is_initialized()
    return [*sizes, len(buffers), made.closed, summed(mesh.group("dp"))]


@pytest.mark.parametrize("which", RELEASES)
def test_destroy_also_ends_upstream_buffers_and_expert_contexts(which: str) -> None:
    """The contexts of experts end before the groups. A gloo group of another mesh is not destroyed."""
    expected = {"installed": [1, True, 2.0], "newest": [2, 0, True, 2.0]}[which]
    with release(which):
        megatron.install()
        assert run_ranks(4, _destroy_model_parallel) == [expected] * 4


# Training on our groups.


FUSED = ("masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation")
OFF = ("hidden_dropout", "attention_dropout", *(f"{name}_fusion" for name in FUSED))


def _train_gpt(pass_groups: bool, tp: int, steps: int) -> tuple[list[float], bool]:
    """Losses of a small GPTModel over tp and dp, on the groups of the imported parallel state."""
    warnings.simplefilter("ignore")
    # megatron-core allocates its buffers on the current CUDA device.
    vars(torch.cuda)["current_device"] = lambda: "cpu"
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_installed = binding.LIBRARY.installed
    # The dropout is 0, and the tracker needs CUDA devices for its RNG states.
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    parallel_state.initialize_model_parallel(tp)
    torch.manual_seed(3)
    settings = dict.fromkeys(OFF, 0) | {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    settings |= {"ffn_hidden_size": 32, "tensor_model_parallel_size": tp, "use_cpu_initialization": True}
    config = TransformerConfig(**settings)
    # Passed to the model, or looked up by the model.
    groups = ProcessGroupCollection.use_mpu_process_groups() if pass_groups else None
    layers = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config, layers, 32, max_sequence_length=8, parallel_output=True, pg_collection=groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_group = parallel_state.get_data_parallel_group()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 32, (parallel_state.get_data_parallel_world_size() * 2, 8), generator=generator)
    rank = parallel_state.get_data_parallel_rank()
    local_tokens = tokens[rank * 2 : rank * 2 + 2]
    losses = []
    for _ in range(steps):
        mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), diagonal=1)
        positions = torch.arange(8).expand(2, -1)
        loss = model(local_tokens, positions, mask, labels=local_tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad, group=data_group)
            param.grad /= data_group.size()
        optimizer.step()
        losses.append(summed(data_group, loss.item()) / data_group.size())
    on_mesh = not is_installed or data_group is megatron.current_mesh().group("dp")
    if is_installed and groups is not None:
        on_mesh = on_mesh and groups.tp is megatron.current_mesh().group("tp")
    parallel_state.destroy_model_parallel()
    return losses, on_mesh


@contextmanager
def _import_gpt(which: str, *, install: bool) -> Iterator[None]:
    """Import megatron-core's model once for all ranks, with or without our groups."""
    put_first(which)
    forget()
    try:
        with without_triton() if which == "newest" else nullcontext():
            if install:
                megatron.install()
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
            importlib.import_module("megatron.core.models.gpt.gpt_model")
        yield
    finally:
        megatron.uninstall()
        put_first("installed")


@pytest.mark.parametrize("which", RELEASES)
def test_a_gpt_model_trains_on_our_groups_as_on_upstream_groups(which: str) -> None:
    cases = [(2, False), (4, True)]
    results: list[Any] = []
    for install in (False, True):
        with _import_gpt(which, install=install):
            of_cases = []
            for tp, pass_groups in cases:
                of_cases.append(run_ranks(4, _train_gpt, install and pass_groups, tp, 4, timeout=240))
            results.append(of_cases)
    for of_upstream, of_ours in zip(*results, strict=True):
        for (expected, _), (losses, on_mesh) in zip(of_upstream, of_ours, strict=True):
            assert on_mesh
            assert losses == expected
            assert losses[-1] < losses[0]


def _run_pipeline() -> list[list[float]]:
    """Losses of megatron-core's schedule, on the accessors' groups and on passed groups."""
    warnings.simplefilter("ignore")
    zeros = torch.zeros
    vars(torch)["zeros"] = lambda *size, device=None, **rest: zeros(*size, **rest)  # noqa: ARG005  megatron-core passes "cuda"
    vars(torch.cuda).update(current_device=lambda: "cpu", synchronize=lambda: None)
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(2, 2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage)
    model: Any = torch.nn.Linear(4, 4, bias=False)
    received: list[Any] = [None]
    model.set_input_tensor = received.append
    model.model_type = "a test's"
    model.config = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float)
    model.config.hidden_size = 4

    def step(batches: Any, model: Any) -> Any:
        input_ = received[-1]
        input_ = input_[0] if isinstance(input_, list) else input_
        out = model(next(batches) if input_ is None else input_)
        return out, lambda out: (out.sum(), {"loss": out.sum().item()})

    def losses(**groups: Any) -> list[float]:
        batches = iter([torch.full((3, 2, 4), float(batch)) for batch in range(5)])
        sizes = {"num_microbatches": 5, "seq_length": 3, "micro_batch_size": 2}
        groups |= {
            "forward_step_func": step,
            "data_iterator": batches,
            "model": [model],
            "forward_only": True,
        }
        outputs = schedules.forward_backward_pipelining_without_interleaving(**sizes, **groups)
        return [output["loss"] for output in outputs]

    results = [losses()]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    communicator = p2p_communication.P2PCommunicator(pp_group=groups.pp, config=model.config)
    results.append(losses(p2p_communicator=communicator, pg_collection=groups))
    parallel_state.destroy_model_parallel()
    return results


@pytest.mark.oracle("megatron.core")
def test_megatron_core_s_pipeline_schedule_runs_on_our_groups() -> None:
    with _import_gpt("installed", install=True):
        importlib.import_module("megatron.core.pipeline_parallel.schedules")
        *first, second, last = run_ranks(4, _run_pipeline)
    assert first == [[[], []]] * 2
    weights = []
    for stage in range(2):
        torch.manual_seed(stage)
        weights.append(torch.nn.Linear(4, 4, bias=False).weight.detach())
    expected = [
        (torch.full((3, 2, 4), float(batch)) @ weights[0].t() @ weights[1].t()).sum().item()
        for batch in range(5)
    ]
    for losses in (second, last):
        assert losses[0] == losses[1] == pytest.approx(expected, abs=1e-5)
