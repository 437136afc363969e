"""Megatron's code on our groups: putting the dialect under its import path, and training its own layers."""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from installing import run_python, without
from megatron_cases import comparable, kind_of, reset
from megatron_newest import NEWEST, RELEASES, forget, put_first, release, without_triton
from ranks import fake_world, live_groups, run_ranks

import namedmesh
from namedmesh import LayoutError
from namedmesh.compat import megatron
from namedmesh.compat.megatron import process_groups_config
from namedmesh.compat.megatron.process_groups_config import fields

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_without_megatron_core_the_import_paths_are_made_up() -> None:
    code = without("megatron") + textwrap.dedent("""
        from namedmesh.compat import megatron
        before = set(sys.modules)
        megatron.install()
        megatron.install()
        import megatron.core
        import megatron.core.parallel_state as ps
        from megatron.core import mpu, parallel_state, tensor_parallel
        from megatron.core.parallel_state import get_tensor_model_parallel_group
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.hyper_comm_grid import HyperCommGrid
        from namedmesh.compat import megatron as ours
        assert ps is mpu is parallel_state is ours.parallel_state
        assert tensor_parallel is ours.tensor_parallel
        ours.uninstall()
        ours.uninstall()
        assert not [name for name in sys.modules if name.partition(".")[0] == "megatron"]
        assert set(sys.modules) - before == set()
        try:
            import megatron
        except ModuleNotFoundError:
            print("gone")
    """)
    assert run_python(code) == "gone\n"


@pytest.mark.oracle("megatron.core")
def test_installed_before_the_first_import_every_module_of_megatron_core_uses_it() -> None:
    code = """
        import sys, types, warnings
        warnings.simplefilter("ignore")
        from namedmesh.compat import megatron as ours
        ours.install()
        import megatron.core.parallel_state as by_its_full_name
        assert by_its_full_name is ours.parallel_state
        import megatron.core
        from megatron.core import mpu, parallel_state
        import megatron.core.models.gpt.gpt_model
        assert mpu is parallel_state is ours.parallel_state is megatron.core.mpu
        held = [name for name, module in list(sys.modules.items()) if name.startswith("megatron")
                and getattr(module, "parallel_state", None) is ours.parallel_state]
        print(len(held) > 10)
        ours.uninstall()
        left = [name for name in sys.modules if name.partition(".")[0] == "megatron"]
        assert not left, left
        from megatron.core import parallel_state as real
        assert real is not ours.parallel_state and real.__file__.endswith("core/parallel_state.py")
        from megatron.core import mpu
        assert mpu is real
    """
    assert run_python(code, action="ignore") == "True\n"


@pytest.mark.oracle("megatron.core")
def test_installed_too_late_it_says_who_keeps_the_original() -> None:
    code = """
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core.tensor_parallel
            real = megatron.core.parallel_state
        from namedmesh.compat import megatron as ours
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours.install()
        text = str(caught[0].message)
        assert "megatron.core.tensor_parallel.layers" in text and caught[0].filename == "<string>"
        assert text.endswith("keep the original of megatron.core.parallel_state, megatron.core.mpu; call install() before "
                             "the first import of megatron.core"), text
        import megatron.core.parallel_state as state
        from megatron.core import mpu
        assert state is mpu is ours.parallel_state
        ours.uninstall()
        import megatron.core
        assert megatron.core.parallel_state is megatron.core.mpu is real
        import sys
        assert sys.modules["megatron.core.parallel_state"] is real and "megatron.core.mpu" not in sys.modules
        print("said")
    """
    assert run_python(code) == "said\n"


# Training on our groups.


def _gpt_losses(handed_over: bool, sizes: dict[str, int], steps: int) -> tuple[list[float], bool]:
    """Losses of a small GPTModel, data-parallel over what is left, on the groups of the state that is imported."""
    import warnings

    warnings.simplefilter("ignore")
    vars(torch.cuda)["current_device"] = lambda: (
        "cpu"
    )  # where megatron-core's own buffers are, whatever the machine
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    mine = parallel_state is megatron.parallel_state
    # The dropout that it draws for is 0, and the tracker keeps states of CUDA devices.
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes["tensor_model_parallel_size"],
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=32,
        max_sequence_length=8,
        parallel_output=True,
        # Handed over one by one, or asked for by the model itself.
        pg_collection=megatron.process_groups(megatron.current_mesh()) if handed_over else None,
    )
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
        total = loss.detach().clone()
        dist.all_reduce(total, group=data_group)
        losses.append(total.item() / data_group.size())
    ours = not mine or data_group is megatron.current_mesh().group("dp")
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
                megatron.select_release()
                megatron.install()
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
            importlib.import_module("megatron.core.models.gpt.gpt_model")
        yield
    finally:
        megatron.uninstall()
        put_first("installed")
        megatron.select_release()


@pytest.mark.parametrize("which", RELEASES)
def test_a_gpt_model_trains_on_our_groups_as_on_megatron_s_own(which: str) -> None:
    cases = [(2, False), (4, True)]
    told = []
    for mine in (False, True):
        with _gpt_on(which, mine=mine):
            told.append(
                [
                    run_ranks(
                        4, _gpt_losses, mine and over, {"tensor_model_parallel_size": tp}, 4, timeout=240
                    )
                    for tp, over in cases
                ]
            )
    for theirs, ours in zip(*told, strict=True):
        assert all(shared for _, shared in ours)
        for (mine_, _), (original, _) in zip(ours, theirs, strict=True):
            assert mine_ == original
            assert mine_[-1] < mine_[0]


# Groups handed from call to call.


def _with_a_collection() -> list[Any]:
    """megatron-core's layers on groups of a mesh that the accessors are not bound to."""
    import warnings

    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as real
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    mesh = namedmesh.init_mesh(dp=2, tp=2)
    groups = megatron.process_groups(mesh)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True
    )
    torch.manual_seed(0)
    init = torch.nn.init.xavier_normal_
    column = ColumnParallelLinear(8, 16, config=config, init_method=init, tp_group=groups.tp, bias=False)
    row = RowParallelLinear(
        16,
        8,
        config=config,
        init_method=init,
        tp_group=groups.tp,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
    torch.manual_seed(0)
    full = [torch.empty(16, 8), torch.empty(8, 16)]
    for weight in full:
        init(weight)
    value = torch.randn(3, 2, 8)
    expected = value @ full[0].t() @ full[1].t()
    told = [
        torch.allclose(row(column(value)[0])[0], expected, atol=1e-6),
        groups.tp is mesh.group("tp"),
        groups.dp_cp.size(),
        repr(groups),
        real.is_initialized() or megatron.parallel_state.is_initialized(),
    ]
    mesh.close()
    return told


@pytest.mark.oracle("megatron.core")
def test_megatron_core_s_layers_take_a_collection_of_ours() -> None:
    for told in run_ranks(4, _with_a_collection):
        shown = told.pop(3)
        assert told == [True, True, 2, False]
        assert shown.startswith("ProcessGroupCollection(tp(2), pp(1), mp(2), embd(1), pos_embd(1), cp(1),")


def _pipelined() -> list[list[float]]:
    """Losses of megatron-core's own schedule: on the accessors' groups, and on a grid's that are handed over."""
    import warnings

    warnings.simplefilter("ignore")
    zeros = torch.zeros
    vars(torch)["zeros"] = lambda *size, device=None, **rest: zeros(*size, **rest)  # noqa: ARG005  its "cuda"
    vars(torch.cuda).update(current_device=lambda: "cpu", synchronize=lambda: None)
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    assert parallel_state is megatron.parallel_state
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
        told = schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter([torch.full((3, 2, 4), float(batch)) for batch in range(5)]),
            model=[model],
            num_microbatches=5,
            seq_length=3,
            micro_batch_size=2,
            forward_only=True,
            **groups,
        )
        return [each["loss"] for each in told]

    told = [losses()]
    grid = megatron.HyperCommGrid([2, 1, 2, 1], ["tp", "cp", "pp", "dp"])
    groups: Any = ProcessGroupCollection()
    groups.pp = grid.create_pg("pp")
    # Of torch, and so made by everyone: ranks that each name their own stages meet under one name, and may hang.
    ends = [dist.new_group(ranks) for ranks in grid.get_rank_enum("pp")]
    groups.embd = next(group for group in ends if group != dist.GroupMember.NON_GROUP_MEMBER)
    groups.pos_embd = None
    groups.tp, groups.cp, groups.dp_cp = (grid.create_pg(dims) for dims in ("tp", "cp", ["dp", "cp"]))
    talks = p2p_communication.P2PCommunicator(pp_group=groups.pp, config=model.config)
    told.append(losses(p2p_communicator=talks, pg_collection=groups))
    grid.close()
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


@pytest.mark.parametrize("which", RELEASES)
def test_the_collection_is_the_original_s(which: str) -> None:
    with release(which) as theirs, fake_world(16, 5):
        original = importlib.import_module("megatron.core.process_groups_config")
        assert [field.name for field in dataclasses.fields(original.ProcessGroupCollection)] == fields()
        sizes = {"create_gloo_process_groups": False, "num_distributed_optimizer_instances": 2}
        told = []
        for state, module in ((theirs, original), (megatron.parallel_state, process_groups_config)):
            state.initialize_model_parallel(2, 2, **sizes)
            kind = module.ProcessGroupCollection
            whole, some = kind.use_mpu_process_groups(), kind.use_mpu_process_groups(["tp", "dp"])
            told.append([repr(whole), repr(some), hasattr(some, "pp"), comparable(dict(vars(whole)))])
            for instances in (1, 2):
                ddp = SimpleNamespace(
                    num_distributed_optimizer_instances=instances, use_distributed_optimizer=True
                )
                chunk = SimpleNamespace(ddp_config=ddp, config=SimpleNamespace(context_parallel_size=1))
                for given in (None, whole, some):
                    for call in (
                        partial(kind.setup_process_groups_for_optimizer, given, [chunk], False),
                        partial(kind.setup_process_groups_for_ddp, given, chunk.config, ddp),
                    ):
                        told[-1].append(_setup(call))
            reset(state)
    assert len(told[0]) == 16
    for mine, expected in zip(told[1], told[0], strict=True):
        # Ours has what the newer release has, too.
        assert ({name: mine[name] for name in expected} if isinstance(expected, dict) else mine) == expected


def _setup(call: Any) -> Any:
    try:
        return {name: comparable(group) for name, group in call().items()}
    except ValueError as error:
        return kind_of(error)


@pytest.mark.oracle(NEWEST)
def test_collections_of_several_modules() -> None:
    with release("newest"), fake_world(4):
        original = importlib.import_module("megatron.core.process_groups_config")
        told = []
        for module in (original, process_groups_config):
            some = module.ProcessGroupCollection(cp=dist.group.WORLD)
            kind = module.MultiModuleProcessGroupCollection
            both = kind({"vision": module.ProcessGroupCollection(), "text": some}, "text")
            told.append([repr(both), len(both), list(both.keys()), both.get_language_model_cp_size()])
            told[-1] += [both["text"] is some, list(both)[1] is some, [name for name, _ in both.items()]]
            told[-1] += [both.get_module_collection("text") is some, len(list(both.values()))]
            lone = kind({"vision": some})
            told[-1] += [repr(lone), lone.has_language_model(), both.has_language_model()]
            for call in (
                partial(kind, {}),
                partial(kind, {"vision": some}, "text"),
                lone.get_language_model_collection,
                partial(both.get_module_collection, "audio"),
            ):
                with pytest.raises(ValueError, match=r"."):
                    call()
    assert told[0] == told[1]


def test_a_collection_of_some_groups() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
        with megatron.bind(mesh):
            some = megatron.ProcessGroupCollection.use_mpu_process_groups(["tp", "hcp"])
        assert some.tp is mesh.group("tp")
        with pytest.raises(LayoutError, match="'tq' is none of Megatron's groups, which are tp, pp"):
            megatron.ProcessGroupCollection(tq=None)
        with pytest.raises(ValueError, match="did you mean 'embd'"):
            megatron.ProcessGroupCollection.use_mpu_process_groups(["embed"])
        mesh.close()


# The grid.


@pytest.mark.parametrize("which", RELEASES)
@pytest.mark.oracle("einops")
def test_the_grid_enumerates_as_the_original(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "128")
    with release(which):
        original = importlib.import_module("megatron.core.hyper_comm_grid").HyperCommGrid
        for offset in (0, 7):
            grids = [
                kind([2, 3, 4, 5], ["tp", "cp", "pp", "dp"], offset)
                for kind in (original, megatron.HyperCommGrid)
            ]
            for dims in ("tp", ["tp", "pp"], ["pp", "tp"], ["dp", "cp", "tp"]):
                assert grids[0].get_rank_enum(dims) == grids[1].get_rank_enum(dims)
            told = [[grid.size, grid.shape, grid.dim_names] for grid in grids]
            assert told[0] == told[1]


@pytest.mark.oracle(NEWEST)
def test_views_of_a_grid_as_in_the_original() -> None:
    told = []
    with release("newest"):
        original = importlib.import_module("megatron.core.hyper_comm_grid").HyperCommGrid
        for kind in (original, megatron.HyperCommGrid):
            with fake_world(18, 5), pytest.MonkeyPatch.context() as patched:
                patched.delenv("WORLD_SIZE", raising=False)
                before = live_groups()
                grid = kind([2, 2, 4], ["tp", "dp", "pp"], 1)
                grid.register_view("expert", [1, 4, 4], ["etp", "ep", "pp"], shared_dims=["pp"])
                own = [
                    grid.create_pg("pp"),
                    grid.create_pg("ep", view="expert"),
                    grid.create_pg(["pp", "ep"], view="expert"),
                ]
                assert grid.get_pg("pp", view="expert") is own[0]
                assert grid.get_pg(["ep", "pp"], view="expert") is own[2]
                told.append([comparable(own), grid.is_current_rank_in_grid()])
                told[-1].append(
                    [grid.get_rank_enum(dims, view="expert") for dims in ("ep", "pp", ["pp", "ep"])]
                )
                for call in (
                    partial(grid.register_view, "expert", [16], ["x"]),
                    partial(grid.register_view, "odd", [8], ["x"]),
                    partial(grid.register_view, "odd", [4, 4], ["pp", "x"], ["pp"]),
                    partial(grid.register_view, "odd", [4, 4], ["x", "y"], ["pp"]),
                    partial(grid.create_pg, "pp", view="expert"),
                    partial(grid.get_pg, "dp"),
                    partial(grid.get_pg, "dp", view="other"),
                ):
                    with pytest.raises((ValueError, KeyError)) as caught:
                        call()
                    told[-1].append(
                        isinstance(
                            caught.value, ValueError if "not in view" in str(caught.value) else Exception
                        )
                    )
                with pytest.raises(ValueError, match="dp"):
                    grid.get_pg("dp", view="expert")
                grid.destroy()
                assert live_groups() == before
                assert grid.create_pg("tp") is not None
                grid.destroy()
    assert told[0] == told[1]


def _grid() -> list[Any]:
    grid = megatron.HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=1)
    inside = dist.get_rank() >= 1
    group = grid.create_pg(["dp", "tp"], group_desc="all of them")
    told: list[Any] = [group is None]
    if inside:
        assert group is grid.get_pg(["tp", "dp"])
        one = grid.create_pg("tp")
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=one)
        told.append(tensor.item())
    for method, dims in ((grid.get_pg, "dp"), (grid.create_pg, "sp")):
        try:
            method(dims)
        except KeyError as error:
            told.append(str(error))
    grid.close()
    return told


def test_a_grid_over_a_part_of_the_world() -> None:
    outside, *inside = run_ranks(5, _grid)
    messages = [
        "there are no groups over 'dp'; call create_pg first, on every rank",
        "['sp'] of 'sp' is not among the dims ['tp', 'dp']; name one or more of them",
    ]
    assert outside == [True, *messages]
    for rank, told in enumerate(inside, start=1):
        assert told == [False, 3 if rank in (1, 2) else 7, *messages]


def test_a_grid_over_a_mesh_hands_out_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="the size of the world is not known"):
        megatron.HyperCommGrid([2], ["tp"])
    with fake_world(8, 3):
        mesh = namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
        grid = megatron.HyperCommGrid.from_mesh(mesh)
        assert grid.get_pg("tp") is mesh.group("tp")
        assert grid.dim_names == ["tp", "dp"]
        assert grid.create_pg(["tp", "dp"]) is mesh.group("dp", "tp")
        with pytest.raises(KeyError, match="the groups over 'tp' exist"):
            grid.create_pg("tp")
        grid.close()
        assert mesh.size("tp") == 2
        mesh.close()
        with pytest.raises(RuntimeError, match="needs 16 ranks, and the world has 8; change a size"):
            megatron.HyperCommGrid([16], ["tp"])
        with pytest.raises(LayoutError, match="pg_options is a dict"):
            megatron.HyperCommGrid([8], ["tp"]).create_pg("tp", pg_options={})
