"""Megatron's code on our groups: filling its variables, standing in for it, and training its own layers."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
import warnings
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from installing import run_python
from megatron_newest import RELEASES, forget, put_first, release, without_triton
from ranks import fake_world, run_ranks, summed

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
def test_only_what_makes_and_destroys_groups_is_ours(which: str) -> None:
    with release(which) as original:
        functions = {name: value for name, value in vars(original).items() if inspect.isfunction(value)}
        megatron.install()
        ours = {name for name, value in functions.items() if getattr(original, name) is not value}
        assert ours == {"initialize_model_parallel", "destroy_model_parallel"}
        megatron.uninstall()
        assert all(getattr(original, name) is value for name, value in functions.items())


def test_a_release_that_makes_groups_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Any = ModuleType("megatron.core.parallel_state")
    monkeypatch.setitem(sys.modules, old.__name__, old)
    with pytest.raises(RuntimeError, match=r"no create_group\(\), which 0\.14 to 0\.19 have; install one"):
        megatron.install()
    assert not binding.PATCH.installed
    with fake_world(2):
        mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
        megatron.bind(mesh, create_gloo_process_groups=False)  # the stand-in
        assert megatron.parallel_state.get_tensor_model_parallel_group() is mesh.group("tp")
        mesh.close()


def _destroyed() -> list[object]:
    from megatron.core import parallel_state

    mesh = namedmesh.init_mesh(dp=2, tp=2, timeout=timedelta(minutes=30))  # Megatron's, so that they share
    parallel_state.initialize_model_parallel(2)
    made = megatron.current_mesh()
    told: list[object] = []
    experts: Any = ModuleType("megatron.core.transformer.moe.fused_a2a")
    experts.nccl_ep_finalize = lambda: told.append(parallel_state.get_tensor_model_parallel_group().size())
    sys.modules[experts.__name__] = experts
    buffers = getattr(parallel_state, "SymmetricMemoryManager", SimpleNamespace(_buffers={}))._buffers
    buffers["tp"] = object()
    with megatron.bind(mesh):
        parallel_state.destroy_model_parallel()
        assert not parallel_state.is_initialized()
    return [*told, len(buffers), made.closed, summed(mesh.group("dp"))]


@pytest.mark.parametrize("which", RELEASES)
def test_destroying_ends_what_the_original_keeps_beside_groups(which: str) -> None:
    """Experts' contexts, while there are groups, and buffers; but no group of gloo, which is another mesh's too."""
    expected = {"installed": [1, True, 2.0], "newest": [2, 0, True, 2.0]}[which]
    with release(which):
        megatron.install()
        assert run_ranks(4, _destroyed) == [expected] * 4


# Training on our groups.


FUSED = ("masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation")
OFF = ("hidden_dropout", "attention_dropout", *(f"{name}_fusion" for name in FUSED))


def _gpt_losses(handed_over: bool, tp: int, steps: int) -> tuple[list[float], bool]:
    """Losses of a small GPTModel, data-parallel over what is left, on the groups of the state that is imported."""
    warnings.simplefilter("ignore")
    # Where megatron-core's own buffers are, whatever the machine.
    vars(torch.cuda)["current_device"] = lambda: "cpu"
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    mine = binding.PATCH.installed
    # The dropout that it draws for is 0, and the tracker keeps states of CUDA devices.
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    parallel_state.initialize_model_parallel(tp)
    torch.manual_seed(3)
    given = dict.fromkeys(OFF, 0) | {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    given |= {"ffn_hidden_size": 32, "tensor_model_parallel_size": tp, "use_cpu_initialization": True}
    config = TransformerConfig(**given)
    # Handed over one by one, or asked for by the model itself.
    groups = ProcessGroupCollection.use_mpu_process_groups() if handed_over else None
    layers = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config, layers, 32, max_sequence_length=8, parallel_output=True, pg_collection=groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_group = parallel_state.get_data_parallel_group()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 32, (parallel_state.get_data_parallel_world_size() * 2, 8), generator=generator)
    rank = parallel_state.get_data_parallel_rank()
    mine_tokens = tokens[rank * 2 : rank * 2 + 2]
    losses = []
    for _ in range(steps):
        mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), diagonal=1)
        positions = torch.arange(8).expand(2, -1)
        loss = model(mine_tokens, positions, mask, labels=mine_tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=data_group)
            parameter.grad /= data_group.size()
        optimizer.step()
        losses.append(summed(data_group, loss.item()) / data_group.size())
    ours = not mine or data_group is megatron.current_mesh().group("dp")
    if mine and groups is not None:
        ours = ours and groups.tp is megatron.current_mesh().group("tp")
    parallel_state.destroy_model_parallel()
    return losses, ours


@contextmanager
def _gpt_on(which: str, *, mine: bool) -> Iterator[None]:
    """megatron-core's model, imported once for all ranks, on our groups or on its own."""
    put_first(which)
    forget()
    try:
        with without_triton() if which == "newest" else nullcontext():
            if mine:
                megatron.install()
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
            importlib.import_module("megatron.core.models.gpt.gpt_model")
        yield
    finally:
        megatron.uninstall()
        put_first("installed")


@pytest.mark.parametrize("which", RELEASES)
def test_a_gpt_model_trains_on_our_groups_as_on_megatron_s_own(which: str) -> None:
    cases = [(2, False), (4, True)]
    told = []
    for mine in (False, True):
        with _gpt_on(which, mine=mine):
            told.append([run_ranks(4, _gpt_losses, mine and over, tp, 4, timeout=240) for tp, over in cases])
    for theirs, ours in zip(*told, strict=True):
        assert all(shared for _, shared in ours)
        for (mine_, _), (original, _) in zip(ours, theirs, strict=True):
            assert mine_ == original
            assert mine_[-1] < mine_[0]


def _pipelined() -> list[list[float]]:
    """Losses of megatron-core's own schedule: on the accessors' groups, and on those that are handed over."""
    warnings.simplefilter("ignore")
    zeros = torch.zeros
    vars(torch)["zeros"] = lambda *size, device=None, **rest: zeros(*size, **rest)  # noqa: ARG005  its "cuda"
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
        given = received[-1]
        given = given[0] if isinstance(given, list) else given
        out = model(next(batches) if given is None else given)
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
        told = schedules.forward_backward_pipelining_without_interleaving(**sizes, **groups)
        return [each["loss"] for each in told]

    told = [losses()]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    talks = p2p_communication.P2PCommunicator(pp_group=groups.pp, config=model.config)
    told.append(losses(p2p_communicator=talks, pg_collection=groups))
    parallel_state.destroy_model_parallel()
    return told


@pytest.mark.oracle("megatron.core")
def test_megatron_core_s_pipeline_schedule_runs_on_our_groups() -> None:
    with _gpt_on("installed", mine=True):
        importlib.import_module("megatron.core.pipeline_parallel.schedules")
        *first, second, last = run_ranks(4, _pipelined)
    assert first == [[[], []]] * 2
    weights = []
    for stage in range(2):
        torch.manual_seed(stage)
        weights.append(torch.nn.Linear(4, 4, bias=False).weight.detach())
    expected = [
        (torch.full((3, 2, 4), float(batch)) @ weights[0].t() @ weights[1].t()).sum().item()
        for batch in range(5)
    ]
    for told in (second, last):
        assert told[0] == told[1] == pytest.approx(expected, abs=1e-5)
