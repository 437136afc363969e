"""Megatron's layers, mappings and loss do what megatron-core's do, rank by rank."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from legacy_layers import differences, facts, results, shard
from messages import refuses
from ranks import fake_world, run_ranks
from torch import Tensor, nn
from tp_compare import apart, numbers

from namedmesh import MeshError
from namedmesh.compat.errors import ContractError
from namedmesh.compat.layers import fill_shard
from namedmesh.compat.megatron import parallel_state, tensor_parallel
from namedmesh.compat.megatron.tensor_parallel import layers as our_layers
from namedmesh.compat.megatron.tensor_parallel import mappings as our_mappings
from namedmesh.compat.megatron.tensor_parallel import utils as our_utils
from namedmesh.compat.regions import RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable

S, B, H, OUT = 8, 3, 12, 16  # sequence, batch, features in and out: divisible by 4 ranks and a stride of 2


@pytest.fixture(scope="module", params=[2, 4])
def compared(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank finds where it compares the original's and ours."""
    import_module("megatron.core.tensor_parallel")  # before the ranks are forked, once
    found: list[dict[str, Any]] = run_ranks(request.param, compare)
    return found


def compare() -> dict[str, Any]:
    """Everything over megatron-core's parallel state; it allocates on CUDA whatever it is told."""
    from megatron.core import parallel_state as state

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
    group = state.get_tensor_model_parallel_group()
    parts = {
        "layers": compare_layers,
        "shared weight": compare_shared_weight,
        "embeddings": compare_embeddings,
        "states": carry_states,
        "mappings": compare_mappings,
        "losses": compare_losses,
        "helpers": compare_helpers,
    }
    return {name: part(group) for name, part in parts.items()}


# --- layers -------------------------------------------------------------------------------------------------

KEPT, APART = {"keep_master_weight_for_test": True}, {"skip_bias_add": True}
SEQUENCE, EXPERTS = {"sequence_parallel": True}, {"expert_model_parallel_size": 2, "sequence_parallel": True}
# A layer's arguments and its configuration's. The input of a row layer is sharded already, unless it is whole.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "column": ({}, {}),
    "column, gathered": ({"gather_output": True}, {}),
    "column, no bias": ({"bias": False}, {}),
    "column, bias apart": (APART, {}),
    "column, stride": ({"stride": 2, **KEPT}, {}),
    "column, unreduced": ({"disable_grad_reduce": True}, {}),
    "column, sequence": ({}, SEQUENCE),
    "column, sequence, unreduced": ({"disable_grad_reduce": True}, SEQUENCE),
    "column, expert": ({"is_expert": True}, EXPERTS),
    "row": ({}, {}),
    "row, whole input": ({}, {}),
    "row, no bias": ({"bias": False}, {}),
    "row, bias apart": (APART, {}),
    "row, stride": ({"stride": 3, **KEPT}, {}),
    "row, sequence": ({}, SEQUENCE),
    "row, sequence, bias apart": (APART, SEQUENCE),
    "row, expert": ({"is_expert": True, **APART}, EXPERTS),
    "column, frozen": ({}, {}),
    "column, sequence, frozen": ({}, SEQUENCE),
    "row, frozen": ({}, {}),
    "row, bfloat16": ({}, {"params_dtype": torch.bfloat16}),
}
MARKS = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "allreduce",
    "sequence_parallel",
    "expert_tp",
    "is_qkv",
)


def pair(name: str, group: Any) -> tuple[Any, Any]:
    """The original's layer and ours, made from the same seed."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import layers as theirs

    arguments, settings = CASES[name]
    kind = "Row" if name.startswith("row") else "Column"
    if kind == "Row":
        arguments = {"input_is_parallel": "whole" not in name, **arguments}
    config = ModelParallelConfig(
        **{
            "use_cpu_initialization": True,
            "params_dtype": torch.float64,
            "tensor_model_parallel_size": dist.get_world_size(),
            **settings,
        }
    )
    defaults: dict[str, Any] = {"bias": True, "skip_bias_add": False, "config": config, "tp_group": group}
    made = []
    for module in (theirs, our_layers):
        torch.manual_seed(7)
        layer = getattr(module, f"{kind}ParallelLinear")(
            H, OUT, init_method=nn.init.xavier_normal_, **{**defaults, **arguments}
        )
        layer.requires_grad_("frozen" not in name)
        made.append(layer)
    return made[0], made[1]


def marks_of(module: nn.Module) -> list[list[Any]]:
    return [[getattr(parameter, mark, "absent") for mark in MARKS] for parameter in module.parameters()]


def compare_layers(group: Any) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (_, settings) in CASES.items():
        theirs, ours = pair(name, group)
        dim = None
        if name.startswith("column, sequence"):
            dim = 0
        elif getattr(ours, "input_is_parallel", False):
            dim = -1
        given = shard(numbers(S, B, H, seed=1).to(settings.get("params_dtype", torch.float64)), dim)
        found[name] = {"marks": marks_of(theirs) == marks_of(ours)} | facts(theirs, ours, given)
    return found


@pytest.mark.oracle("megatron.core")
def test_linear_layers_are_the_originals(compared: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(compared):
        assert list(found["layers"]) == list(CASES)
        for name, one in found["layers"].items():
            bound = 5e-2 if "bfloat16" in name else 1e-13
            assert one.pop("apart") < bound, (rank, name)
            tensors = 1 if "frozen" in name else 2 if "no bias" in name else 3  # input, weight, bias
            expected = {
                "gradients": tensors,
                "weights": True,
                "names": True,
                "marks": True,
                "master": 0.0,
                "state": True,
            }
            assert one == expected, (rank, name)


def compare_shared_weight(group: Any) -> list[float]:
    """A layer without a weight of its own, used with another's, gathered when it is called."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import layers as theirs

    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float64)
    weight = numbers(OUT // dist.get_world_size(), H, seed=dist.get_rank()).requires_grad_()
    calls = []
    for module in (theirs, our_layers):
        layer = module.ColumnParallelLinear(
            H,
            OUT,
            config=config,
            init_method=nn.init.zeros_,
            skip_weight_param_allocation=True,
            tp_group=group,
        )
        assert layer.weight is None
        calls.append(partial(layer, weight=weight, runtime_gather_output=True))
    assert calls[1](numbers(S, B, H, seed=1))[0].shape == (S, B, OUT)
    return differences(calls, numbers(S, B, H, seed=1), [weight])


@pytest.mark.oracle("megatron.core")
def test_a_weight_can_be_passed_to_the_forward(compared: list[dict[str, Any]]) -> None:
    for found in compared:
        assert len(found["shared weight"]) == 3
        assert max(found["shared weight"]) < 1e-13


RANGE = ("vocab_start_index", "vocab_end_index", "num_embeddings_per_partition")


def compare_embeddings(group: Any) -> dict[str, dict[str, Any]]:
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import layers as theirs

    ids = torch.randint(0, OUT, (B, S), generator=torch.Generator().manual_seed(3))
    ids[0, :2] = torch.tensor([-1, OUT])  # of no rank: zeros
    found = {}
    for deterministic in (False, True):
        for scattered in (False, True):
            config = ModelParallelConfig(
                use_cpu_initialization=True, params_dtype=torch.float64, deterministic_mode=deterministic
            )
            made = []
            for module in (theirs, our_layers):
                torch.manual_seed(7)
                layer = module.VocabParallelEmbedding(
                    OUT,
                    H,
                    init_method=nn.init.normal_,
                    reduce_scatter_embeddings=scattered,
                    config=config,
                    tp_group=group,
                )
                made.append(layer)
            found[f"{deterministic} {scattered}"] = facts(made[0], made[1], ids) | {
                "marks": marks_of(made[0]) == marks_of(made[1]),
                **{name: getattr(made[0], name) == getattr(made[1], name) for name in RANGE},
            }
    return found


@pytest.mark.oracle("megatron.core")
def test_the_embedding_is_the_originals(compared: list[dict[str, Any]]) -> None:
    for found in compared:
        assert len(found["embeddings"]) == 4
        for name, one in found["embeddings"].items():
            assert one.pop("apart") < 1e-13, name
            same = ("weights", "names", "state", "marks", *RANGE)
            assert one == dict.fromkeys(same, True) | {"master": 0, "gradients": 1}, name


def carry_states(group: Any) -> list[Any]:
    """Each layer's state into the other's, and one without the extra entry."""
    found: list[Any] = []
    for name in ("column", "row"):
        theirs, ours = pair(name, group)
        for source, target in ((theirs, ours), (ours, theirs)):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.normal_()
            state = source.state_dict()
            target.load_state_dict(state)
            found.append(all(map(torch.equal, source.parameters(), target.parameters())))
        old = {key: value for key, value in state.items() if "extra" not in key}
        found.append(str(ours.load_state_dict(old)))
        parent = nn.Sequential(ours)
        found.append(str(parent.load_state_dict({f"0.{key}": value for key, value in old.items()})))
    return found


@pytest.mark.oracle("megatron.core")
def test_states_go_from_one_to_the_other_and_back(compared: list[dict[str, Any]]) -> None:
    matched = "<All keys matched successfully>"
    for found in compared:
        assert found["states"] == [True, True, matched, matched] * 2


# --- mappings -----------------------------------------------------------------------------------------------

MAPPINGS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "copy_to_tensor_model_parallel_region": ((S, B, H), {}),
    "reduce_from_tensor_model_parallel_region": ((S, B, H), {}),
    "scatter_to_tensor_model_parallel_region": ((S, B, H), {}),
    "gather_from_tensor_model_parallel_region": ((S, B, 3), {}),
    "scatter_to_sequence_parallel_region": ((S, B, H), {}),
    "gather_from_sequence_parallel_region": ((2, B, H), {}),
    "gather_from_sequence_parallel_region ": ((2, B, H), {"tensor_parallel_output_grad": False}),
    "gather_from_sequence_parallel_region  ": ((2, B, H), {"use_global_buffer": True}),
    "reduce_scatter_to_sequence_parallel_region": ((S, B, H), {}),
    "all_gather_last_dim_from_tensor_parallel_region": ((S, B, 3), {}),
    "reduce_scatter_last_dim_to_tensor_parallel_region": ((S, B, H), {}),
    "all_to_all_sp2hp": ((2, B, H), {}),
    "all_to_all_hp2sp": ((S, B, 3), {}),
    "all_to_all": ((S, H), {}),
}


def compare_mappings(group: Any) -> dict[str, float]:
    from megatron.core.tensor_parallel import mappings as theirs

    found = {}
    for name, (shape, arguments) in MAPPINGS.items():
        given = numbers(*shape, seed=20 + dist.get_rank())
        functions = [getattr(module, name.strip()) for module in (theirs, our_mappings)]
        calls = [partial(function, group=group, **arguments) for function in functions]
        if name == "all_to_all":  # here the group comes first
            calls = [partial(function, group) for function in functions]
        found[name] = max(differences(calls, given))
    return found


@pytest.mark.oracle("megatron.core")
def test_mappings_are_the_originals(compared: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(compared):
        assert list(found["mappings"]) == list(MAPPINGS)
        assert max(found["mappings"].values()) < 1e-13, (rank, found["mappings"])


def uneven() -> dict[str, float]:
    """Shards of different lengths, against all ranks' tensors put together here."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    group, lengths = dist.group.WORLD, [3, 0, 4, 1][:ranks]
    start, total = sum(lengths[:me]), sum(lengths)
    mine = slice(start, start + lengths[me])
    shards = [numbers(length, 2, seed=rank) for rank, length in enumerate(lengths)]
    parts = [numbers(total, 2, seed=10 + rank) for rank in range(ranks)]
    gradients = [numbers(total, 2, seed=50 + rank) for rank in range(ranks)]  # as ``results`` draws them

    def gathered(value: Tensor) -> Tensor:
        return our_mappings.gather_from_sequence_parallel_region(
            value, group=group, output_split_sizes=lengths
        )

    def gathered_alike(value: Tensor) -> Tensor:
        return our_mappings.gather_from_sequence_parallel_region(value, False, group, lengths)

    def scattered(value: Tensor) -> Tensor:
        return our_mappings.reduce_scatter_to_sequence_parallel_region(value, group, lengths)

    out, back = results(gathered, shards[me])
    found = {
        "gathered": apart(out, torch.cat(shards)),
        "gradient": apart(back, torch.stack(gradients).sum(0)[mine]),
    }
    out, back = results(gathered_alike, shards[me])
    found["gathered alike"] = apart(out, torch.cat(shards))
    found["gradient alike"] = apart(back, gradients[me][mine])
    out, back = results(scattered, parts[me])
    found["scattered"] = apart(out, torch.stack(parts).sum(0)[mine])
    cut = [numbers(length, 2, seed=50 + rank) for rank, length in enumerate(lengths)]
    found["scattered gradient"] = apart(back, torch.cat(cut))

    # Rank i sends i + 2j rows to rank j.
    counts = [[i + 2 * j for j in range(ranks)] for i in range(ranks)]
    receive = [row[me] for row in counts]
    outgoing = [numbers(sum(row), 2, seed=i) for i, row in enumerate(counts)]

    def exchanged(value: Tensor) -> Tensor:
        return our_mappings.all_to_all(group, value, receive, counts[me])

    out, back = results(exchanged, outgoing[me])
    from_each = [whole.split(row)[me] for whole, row in zip(outgoing, counts, strict=True)]
    found["exchanged"] = apart(out, torch.cat(from_each))
    # What a rank received, and so its gradient, has a shard from each rank.
    received = [[row[i] for row in counts] for i in range(ranks)]
    gradient = [numbers(sum(one), 2, seed=50 + i) for i, one in enumerate(received)]
    returned = [whole.split(one)[me] for whole, one in zip(gradient, received, strict=True)]
    found["exchanged gradient"] = apart(back, torch.cat(returned))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_of_different_lengths(world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, uneven)):
        assert max(found.values()) < 1e-13, (rank, found)


# --- loss and helpers ---------------------------------------------------------------------------------------


def compare_losses(group: Any) -> dict[str, Any]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as theirs

    part = OUT // dist.get_world_size()
    whole = numbers(S, B, OUT, seed=1).mul(4)
    target = torch.randint(0, OUT, (S, B), generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for smoothing in (0.0, 0.2):
            logits = shard(whole, -1).to(dtype)
            ours = partial(tensor_parallel.vocab_parallel_cross_entropy, tp_group=group)
            calls = [partial(loss, target=target, label_smoothing=smoothing) for loss in (theirs, ours)]
            found[f"{dtype} {smoothing}"] = max(differences(calls, logits))
    value = shard(whole, -1).float().requires_grad_()
    kept = value.detach().clone()
    loss = tensor_parallel.vocab_parallel_cross_entropy(value, target, tp_group=group)
    loss.sum().backward(retain_graph=True)
    assert value.grad is not None
    once = value.grad.clone()
    loss.sum().backward()
    found["untouched"] = torch.equal(value, kept)
    found["twice"] = torch.equal(value.grad, 2 * once)
    plain = whole.float().requires_grad_()
    wanted = F.cross_entropy(plain.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    wanted.sum().backward()
    found["one process"] = apart(loss, wanted)
    assert plain.grad is not None
    found["one process, gradient"] = apart(once, plain.grad[..., dist.get_rank() * part :][..., :part])
    ignored = target.clone()
    ignored[0, 0], ignored[1, 1] = -100, OUT
    losses = [
        theirs(value.detach().clone(), ignored),
        tensor_parallel.vocab_parallel_cross_entropy(value, ignored, tp_group=group),
    ]
    found["strangers"] = apart(losses[0], losses[1].detach())
    return found


@pytest.mark.oracle("megatron.core")
def test_the_loss_is_the_originals_on_every_rank(compared: list[dict[str, Any]]) -> None:
    for rank, all_found in enumerate(compared):
        found = dict(all_found["losses"])
        assert found.pop("untouched"), rank
        assert found.pop("twice"), rank
        assert len(found) == 9
        assert max(found.values()) < 4e-6, (rank, found)


def compare_helpers(group: Any) -> list[bool]:
    from megatron.core.tensor_parallel import utils as theirs

    given = numbers(4, 6, seed=dist.get_rank())
    cut = [module.split_tensor_into_1d_equal_chunks for module in (theirs, our_utils)]
    view = cut[1](given, tp_group=group)
    return [
        torch.equal(cut[0](given, tp_group=group), view),
        torch.equal(cut[0](given, new_buffer=True, tp_group=group), cut[1](given, True, group)),
        view.untyped_storage().data_ptr() == given.untyped_storage().data_ptr(),
        torch.equal(
            theirs.gather_split_1d_tensor(view, tp_group=group), our_utils.gather_split_1d_tensor(view, group)
        ),
        *(
            list(map(torch.Tensor.tolist, theirs.split_tensor_along_last_dim(given, 3, contiguous)))
            == list(map(torch.Tensor.tolist, our_utils.split_tensor_along_last_dim(given, 3, contiguous)))
            for contiguous in (False, True)
        ),
        our_utils.split_tensor_along_last_dim(given, 3, contiguous_split_chunks=True)[1].is_contiguous(),
        theirs.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 4)
        == our_utils.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 4),
        tensor_parallel.param_is_not_tensor_parallel_duplicate(given, group) == (dist.get_rank() == 0),
    ]


@pytest.mark.oracle("megatron.core")
def test_helpers_are_the_originals(compared: list[dict[str, Any]]) -> None:
    assert [found["helpers"] for found in compared] == [[True] * 9] * len(compared)


@pytest.mark.oracle("megatron.core")
def test_attributes_are_the_originals() -> None:
    from megatron.core.tensor_parallel import layers as theirs

    marked = []
    for module in (theirs, our_layers):
        one, other, plain = (torch.zeros(2) for _ in range(3))
        module.set_tensor_model_parallel_attributes(one, True, 1, 2)
        module.copy_tensor_model_parallel_attributes(other, one)
        module.set_defaults_if_not_set_tensor_model_parallel_attributes(other)
        module.set_defaults_if_not_set_tensor_model_parallel_attributes(plain)
        marked.append([vars(tensor) for tensor in (one, other, plain)])
    assert marked[0] == marked[1]
    assert marked[1][0] == {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 2}


# --- without the original -----------------------------------------------------------------------------------


def default_groups() -> list[Any]:
    """Layers and functions without a group, over the tensor-parallel half of the world."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    layer = our_layers.ColumnParallelLinear(4, 6)
    expert = our_layers.ColumnParallelLinear(4, 6, is_expert=True, gather_output=False)
    output, bias = layer(torch.ones(2, 4))
    total = our_mappings.reduce_from_tensor_model_parallel_region(torch.tensor([float(dist.get_rank())]))
    loss = tensor_parallel.vocab_parallel_cross_entropy(torch.zeros(1, 3), torch.tensor([4]))
    first = tensor_parallel.param_is_not_tensor_parallel_duplicate(torch.zeros(1))
    found = [
        layer.tp_group is group,
        expert.tp_group is parallel_state.get_expert_tensor_parallel_group(),
        tuple(output.shape),
        bias,
        total.item(),
        round(loss.item(), 4),
        first,
    ]
    parallel_state.destroy_model_parallel()
    return found


def test_the_group_is_the_tensor_parallel_one_unless_named() -> None:
    found = run_ranks(4, default_groups)
    same = [True, True, (2, 6), None]
    assert found == [[*same, total, 1.7918, rank % 2 == 0] for rank, total in enumerate([1.0, 1.0, 5.0, 5.0])]


def test_the_two_generations_have_their_own_defaults() -> None:
    """Here on one rank, without ``torch.distributed``."""
    old = our_layers.ColumnParallelLinear(4, 6)
    new = our_layers.ColumnParallelLinear(4, 6, config=SimpleNamespace())
    assert (old.gather_output, new.gather_output) == (True, False)
    assert old.tp_group is None
    assert old.weight is not None
    output, bias = old(torch.ones(2, 4))
    assert bias is None
    torch.testing.assert_close(output, F.linear(torch.ones(2, 4), old.weight, old.bias))
    row = our_layers.RowParallelLinear(4, 6, skip_bias_add=True)
    output, bias = row(torch.ones(2, 4))
    assert bias is row.bias
    torch.testing.assert_close(output, F.linear(torch.ones(2, 4), row.weight))
    assert repr(row) == "RowParallelLinear(in_features=4, out_features=6, bias=True, TP=1)"
    embedding = our_layers.VocabParallelEmbedding(8, 4, nn.init.zeros_)
    assert embedding(torch.tensor([[7]])).tolist() == [[[0.0] * 4]]
    assert repr(embedding) == "VocabParallelEmbedding(8, 4, TP=1)"


def test_weights_can_be_left_unfilled() -> None:
    def refuse(_weight: Tensor) -> None:
        raise AssertionError("filled")

    config = SimpleNamespace(perform_initialization=False)
    layer = our_layers.ColumnParallelLinear(4, 6, config=config, init_method=refuse)
    assert layer.weight is not None
    assert vars(layer.weight)["tensor_model_parallel"]
    assert layer.master_weight is None


def _frozen_weight() -> list[float]:
    layer = our_layers.ColumnParallelLinear(4, 6, tp_group=dist.group.WORLD)
    assert layer.weight is not None
    assert layer.bias is not None
    layer.weight.requires_grad_(False)
    layer(torch.ones(2, 4))[0].sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    told: list[float] = layer.bias.grad.tolist()
    return told


def test_a_bias_learns_beside_a_frozen_weight() -> None:
    """In megatron-core it silently does not."""
    assert run_ranks(1, _frozen_weight) == [[2.0] * 6]


def test_layers_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = our_layers.RowParallelLinear(4, 6)
    assert layer.weight.is_meta


def test_sequence_parallelism_on_one_rank_goes_on_without() -> None:
    with pytest.warns(UserWarning, match="goes on without it"):
        layer = our_layers.ColumnParallelLinear(4, 6, config=SimpleNamespace(sequence_parallel=True))
    assert layer.sequence_parallel is False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_can_be_copied_but_not_pickled_with_its_group(rank: int) -> None:
    with fake_world(2, rank):
        layer = our_layers.ColumnParallelLinear(4, 6, tp_group=dist.group.WORLD)
        copied = copy.deepcopy(layer)
        assert copied.tp_group is dist.group.WORLD
        copied.load_state_dict(layer.state_dict())
        with pytest.raises(MeshError) as caught:
            pickle.dumps(layer)
    assert str(caught.value) == (
        "a layer over a process group of 2 ranks cannot be pickled: the group lives in this process only; save the "
        "layer's state_dict(), and load it into a layer made where it is needed"
    )
    assert pickle.loads(pickle.dumps(RankGroup(None))) == RankGroup(None)  # noqa: S301  our own bytes


def test_shards_drawn_on_their_device_differ_between_ranks_and_layers() -> None:
    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(11)
        peers: Any = SimpleNamespace(size=2, rank=rank)
        both = torch.zeros(5), torch.zeros(5)
        for one in both:
            fill_shard(one, nn.init.normal_, peers)
        drawn += [tuple(one.tolist()) for one in both]
        after.append(torch.rand(3).tolist())
    assert len(set(drawn)) == 4
    assert after[0] == after[1]  # what comes later is still the same on all ranks


def test_on_an_accelerator_no_whole_weight_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_layers, "accelerator", lambda: torch.device("cpu"))
    with fake_world(2):
        layer = our_layers.RowParallelLinear(
            6, 4, init_method=Tensor.normal_, keep_master_weight_for_test=True, tp_group=dist.group.WORLD
        )
    assert layer.weight.shape == (4, 3)
    assert layer.weight.std() > 0
    assert layer.master_weight is None


# --- errors -------------------------------------------------------------------------------------------------

COLUMN, ROW, VOCABULARY = (
    our_layers.ColumnParallelLinear,
    our_layers.RowParallelLinear,
    our_layers.VocabParallelEmbedding,
)
FUSED, IN_SEQUENCE = SimpleNamespace(gradient_accumulation_fusion=True), SimpleNamespace(**SEQUENCE)
LOSS = tensor_parallel.vocab_parallel_cross_entropy
GATHER = our_mappings.gather_from_sequence_parallel_region
# What rank 0 of 4 says, and of which call with their group.
ASSERTIONS: dict[str, Callable[[Any], Any]] = {
    "output_size is 10, which ... 4 equal shards; use 8 or 12, ...": lambda group: COLUMN(
        4, 10, tp_group=group
    ),
    "output_size is 12, ... 4 equal shards for each of 2 blocks (the stride); use 8 or 16, or another multiple of 8": (
        lambda group: COLUMN(4, 12, stride=2, tp_group=group)
    ),
    "the stride is 0; it is a number of blocks, 1 or more": lambda group: ROW(4, 4, stride=0, tp_group=group),
    "RowParallelLinear got is_expert with skip_bias_add=False; each rank's output is a part of a sum, in "
    "which the bias would count several times: pass skip_bias_add=True": (
        lambda group: ROW(4, 4, is_expert=True, tp_group=group)
    ),
    "the length of dim 0 of the output is 6, ...": (
        lambda group: ROW(4, 4, config=IN_SEQUENCE, input_is_parallel=True, tp_group=group)(
            torch.zeros(6, 2, 1)
        )
    ),
    "the length of dim 1 of the ids is 5, ...": (
        lambda group: VOCABULARY(8, 4, reduce_scatter_embeddings=True, tp_group=group)(
            torch.zeros(2, 5, dtype=torch.int64)
        )
    ),
    "the length ... 0 ... (6, 2) is 6, ...": (
        lambda group: our_mappings.scatter_to_sequence_parallel_region(torch.zeros(6, 2), group)
    ),
    "the sizes are [1, 2], for 4 ranks; pass one length for each rank, none negative": (
        lambda group: GATHER(torch.zeros(2), True, group, [1, 2])
    ),
    "rank 0 has a shard of length 2 (shape (2,)), but the sizes [1, 2, 3, 4] say 1; pass the length of every "
    "rank's shard, in rank order": lambda group: GATHER(torch.zeros(2), True, group, [1, 2, 3, 4]),
    "the lengths to send [1, 2, 3, 4] add up to 10, but dim 0 of shape (9,) has length 9; they must add up to it": (
        lambda group: our_mappings.reduce_scatter_to_sequence_parallel_region(
            torch.zeros(9), group, [1, 2, 3, 4]
        )
    ),
    "dim 0 of shape (6,) has length 6, which cannot be split into 4 equal shards; pass the length of each shard": (
        lambda group: our_mappings.all_to_all(group, torch.zeros(6))
    ),
    "all_to_all was called without a group; pass the process group of its ranks": (
        lambda _: our_mappings.all_to_all(None, torch.zeros(6))
    ),
    "2 problems:\n"
    "  - the target has shape (3,) and the logits (2, 4); pass one id for each row of logits: shape (2,)\n"
    "  - label_smoothing is 1.0; it can be 0, or between 0 and 1": (
        lambda group: LOSS(torch.zeros(2, 4), torch.zeros(3), 1.0, group)
    ),
    "label_smoothing is 0.5, but a rank's part of the vocabulary has one entry only, and nothing to spread it "
    "over; cut the vocabulary over fewer ranks, or pass 0": (
        lambda group: LOSS(torch.zeros(2, 1), torch.zeros(2), 0.5, group)
    ),
    "the number of elements ... (2, 3) is 6, ...": (
        lambda group: tensor_parallel.split_tensor_into_1d_equal_chunks(torch.zeros(2, 3), tp_group=group)
    ),
    "the tensor of shape (2, 4) has tensor_model_parallel, partition_dim, partition_stride already; mark a tensor "
    "once, or delete the attributes first": (
        lambda group: our_layers.set_tensor_model_parallel_attributes(
            COLUMN(4, 8, tp_group=group).weight, True, 0, 1
        )
    ),
}
RUNTIME_ERRORS: dict[str, Callable[[Any], Any]] = {
    "ColumnParallelLinear: gradient_accumulation_fusion is set, but adding up gradients inside the matrix product "
    "needs APEX's CUDA extension fused_weight_gradient_mlp_cuda, which namedmesh's layers do not call; set "
    "gradient_accumulation_fusion=False": lambda group: COLUMN(4, 4, config=FUSED, tp_group=group),
    "VocabParallelEmbedding: defer_embedding_wgrad_compute is set, ...": (
        lambda group: VOCABULARY(
            4, 4, config=SimpleNamespace(defer_embedding_wgrad_compute=True), tp_group=group
        )
    ),
    "RowParallelLinear got sequence_parallel with input_is_parallel=False; its input features must be cut "
    "already, as ColumnParallelLinear leaves them: pass input_is_parallel=True": (
        lambda group: ROW(4, 4, config=IN_SEQUENCE, tp_group=group)
    ),
    "ColumnParallelLinear was made with skip_weight_param_allocation=True, and its forward got no weight; "
    "pass weight=": (
        lambda group: COLUMN(4, 8, skip_weight_param_allocation=True, tp_group=group)(torch.zeros(1, 4))
    ),
    "ColumnParallelLinear got a weight of shape (4, 6); pass this rank's shard, of shape (2, 4)": (
        lambda group: COLUMN(4, 8, tp_group=group)(torch.zeros(1, 4), weight=torch.zeros(4, 6))
    ),
}


@pytest.mark.parametrize("text", [*ASSERTIONS, *RUNTIME_ERRORS])
def test_mistakes_are_reported(text: str) -> None:
    with fake_world(4):
        group = dist.group.WORLD
        if text in ASSERTIONS:
            refuses(lambda: ASSERTIONS[text](group), AssertionError, text)
        else:
            refuses(lambda: RUNTIME_ERRORS[text](group), RuntimeError, text)


def test_lengths_of_shards_are_checked_on_one_rank_too() -> None:
    value = torch.zeros(2)
    for function in (GATHER, our_mappings.reduce_scatter_to_sequence_parallel_region):
        call: Any = partial(function, value)
        sizes = "output_split_sizes" if function is GATHER else "input_split_sizes"
        assert call(**{sizes: [2]}) is value
        with pytest.raises(ContractError, match=r"\[3\]"):
            call(**{sizes: [3]})


@pytest.mark.parametrize("name", ["", ".layers", ".mappings", ".cross_entropy", ".utils"])
def test_every_module_exports_what_it_names(name: str) -> None:
    module = import_module(f"namedmesh.compat.megatron.tensor_parallel{name}")
    assert module.__all__ == sorted(set(module.__all__))
    for one in module.__all__:
        assert getattr(tensor_parallel, one) is getattr(module, one)
