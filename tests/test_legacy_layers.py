"""The layers, mappings and losses of the dialects do what the originals' do, rank by rank; ezpz's what fairscale's do."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from legacy import agrees, difference, facts, original, results, shard
from messages import refuses
from ranks import fake_world, run_ranks
from tensors import apart, numbers
from torch import Tensor, nn, zeros

from namedmesh.compat import fairscale
from namedmesh.compat.ezpz import tp as ezpz
from namedmesh.compat.layers import fill_shard
from namedmesh.compat.megatron import parallel_state, tensor_parallel
from namedmesh.compat.megatron.tensor_parallel import layers as our_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V, H, OUT = 16, 12, 24
S, B = 8, 3  # sequence and batch
COLUMN, ROW = our_layers.ColumnParallelLinear, our_layers.RowParallelLinear
VOCABULARY, EXCHANGE = our_layers.VocabParallelEmbedding, tensor_parallel.all_to_all
LOSS, FAIRSCALE_LOSS = tensor_parallel.vocab_parallel_cross_entropy, fairscale.vocab_parallel_cross_entropy


@contextmanager
def started() -> Iterator[None]:
    """fairscale's and ezpz's dialect over the whole world, in double precision."""
    torch.set_default_dtype(torch.float64)
    fairscale.initialize_model_parallel(dist.get_world_size())
    ezpz.initialize_tensor_parallel(dist.get_world_size())
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)  # a fake world is in the process of the tests
        fairscale.destroy_model_parallel()
        ezpz.destroy_tensor_parallel()


# --- against one process ------------------------------------------------------------------------------------


EMBEDDINGS: list[dict[str, Any]] = [{}, {"padding_idx": 5}, {"padding_idx": -2}, {"sparse": True}]


def embedding_difference(make: Any, dim: int, options: dict[str, Any]) -> float:
    """An embedding beside a whole one: output and gradient."""
    ids = torch.randint(0, V - 4, (3, 7), generator=torch.Generator().manual_seed(1))  # some never come
    layer, whole = make(V, H, init_method=nn.init.ones_, **options), nn.Embedding(V, H, **options)
    with torch.no_grad():
        whole.weight.copy_(numbers(V, H, seed=5))
        layer.weight.copy_(shard(whole.weight, dim))
    outputs = [whole(ids), layer(ids)]
    for output in outputs:
        output.backward(numbers(3, 7, H, seed=6))
    wanted = shard(whole.weight.grad.to_dense(), dim)  # type: ignore[union-attr]
    return max(apart(outputs[1], outputs[0]), apart(layer.weight.grad.to_dense(), wanted))


def embeddings_beside_whole_ones() -> dict[str, float]:
    found = {}
    with started():
        for options in EMBEDDINGS:
            for dim, kind in enumerate((fairscale.VocabParallelEmbedding, ezpz.ParallelEmbedding)):
                found[f"{kind} {options}"] = embedding_difference(kind, dim, options)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_embeddings_are_shards_of_whole_ones(world_size: int) -> None:
    """Of fairscale's own this does not hold: it takes a padding id for one of each rank's part."""
    for found in run_ranks(world_size, embeddings_beside_whole_ones):
        assert len(found) == 8
        assert agrees(found), found


# --- fairscale, and ezpz -----------------------------------------------------------------------------------

KEPT = {"keep_master_weight_for_test": True}
SIZES = {"ColumnParallelLinear": (H, OUT), "RowParallelLinear": (H, OUT)}
SIZES |= {"VocabParallelEmbedding": (V, H), "ParallelEmbedding": (V, H)}
# A layer, what it is given, and its arguments, one case each.
LAYERS: list[tuple[str, str, list[dict[str, Any]]]] = [
    (
        "ColumnParallelLinear",
        "whole",
        [KEPT, {"gather_output": False}, {"bias": False}, {"stride": 3, **KEPT}],
    ),
    ("RowParallelLinear", "whole", [KEPT, {"bias": False}, {"stride": 3, **KEPT}]),
    ("RowParallelLinear", "shard", [{"input_is_parallel": True}]),
    ("VocabParallelEmbedding", "ids", [{}, {"sparse": True}]),
    ("VocabParallelEmbedding", "strange ids", [{}]),
    ("VocabParallelEmbedding", "ids of the first", [{"padding_idx": 0}]),
    ("ParallelEmbedding", "ids", [{}, {"padding_idx": 3}, {"sparse": True}]),
]
FAIRSCALE_CASES = [(kind, value, one) for kind, value, cases in LAYERS for one in cases]


def given(kind: str) -> Tensor:
    if kind in {"whole", "shard"}:
        return shard(numbers(5, 3, H, seed=1), -1 if kind == "shard" else None)
    ids = torch.randint(0, V, (4, 6), generator=torch.Generator().manual_seed(2))
    if kind == "strange ids":
        ids[0, :2] = torch.tensor([-1, V])
    # The original takes the padding id for one of each rank's part.
    return ids % (V // dist.get_world_size()) if kind == "ids of the first" else ids


def compare_fairscale() -> dict[str, Any]:
    start, theirs = (original(f"fairscale.nn.model_parallel.{part}") for part in ("initialize", "layers"))
    start.initialize_model_parallel(dist.get_world_size())
    found: dict[str, Any] = {}
    with started():
        for kind, value, arguments in FAIRSCALE_CASES:
            for module in (fairscale.layers, ezpz.layers):
                layers = []
                for each in (theirs, module):
                    torch.manual_seed(7)
                    layers.append(getattr(each, kind)(*SIZES[kind], init_method=nn.init.normal_, **arguments))
                one, other = layers
                known = {key for key in vars(one) if not key.startswith("_")}
                known -= {"training", "master_weight", "norm_type"}
                same = {"attributes": all(getattr(other, key) == getattr(one, key) for key in known)}
                if kind.endswith("Linear"):
                    same["gathered"] = apart(one.get_master_weight(), other.get_master_weight()) == 0
                    same["master"] = apart(getattr(one, "master_weight", None), other.master_weight) == 0
                found[f"{module.__name__} {kind} {value} {arguments}"] = same | facts(
                    one, other, given(value)
                )
        found |= compare_mappings()
        one, other = (module.ColumnParallelLinear(H, OUT) for module in (theirs, fairscale.layers))
        other.load_state_dict(one.state_dict())
        for name, layer in (("copied", copy.deepcopy(other)), ("pickled", pickle.loads(pickle.dumps(other)))):  # noqa: S301  our own
            one.weight.requires_grad_(False)
            layer.weight.requires_grad_(False)
            both = (results(each, given("whole"), [each.bias]) for each in (one, layer))
            found[name] = max(map(apart, *both))
    start.destroy_model_parallel()
    return found


def compare_mappings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    theirs = original("fairscale.nn.model_parallel.mappings")
    for name in [name for name in dir(fairscale.mappings) if name.endswith("_region")]:
        value = numbers(3, 2, 8, seed=1 if name.startswith(("copy", "scatter")) else dist.get_rank())
        of_ezpz = getattr(ezpz.mappings, name.replace("model_parallel", "tensor_parallel"))
        for ours in (getattr(fairscale.mappings, name), of_ezpz):
            found[f"{name} {ours}"] = difference((getattr(theirs, name), ours), value)
    parts = numbers(3, 2, 8, seed=dist.get_rank()) * 3
    target = torch.randint(0, 8 * dist.get_world_size(), (3, 2), generator=torch.Generator().manual_seed(1))
    their_loss = original("fairscale.nn.model_parallel.cross_entropy").vocab_parallel_cross_entropy
    losses = [partial(loss, target=target) for loss in (their_loss, FAIRSCALE_LOSS)]
    found["loss"] = difference(losses, parts)
    found["loss in float32"] = difference(losses, parts.float()) < 1e-5
    kept = parts.clone()
    FAIRSCALE_LOSS(parts, target)
    fairscale.reduce_from_model_parallel_region(parts)
    found["left as it is"] = torch.equal(parts, kept)
    return found


@pytest.mark.oracle("fairscale")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fairscale_s_and_ezpz_s_are_fairscale_s(world_size: int) -> None:
    original("fairscale.nn.model_parallel.layers")  # before the ranks are forked, once
    for found in run_ranks(world_size, compare_fairscale):
        wrong = {name: one for name, one in found.items() if not agrees(one)}
        # On one rank the original keeps the parameter itself as the master weight.
        assert not wrong if world_size > 1 else all("master" in one for one in wrong.values()), wrong
        assert len(found) == 2 * len(FAIRSCALE_CASES) + 8 + 3 + 2


# --- Megatron -----------------------------------------------------------------------------------------------

APART = {"skip_bias_add": True}
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
MARKS = ["tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"]
MARKS += ["sequence_parallel", "expert_tp", "is_qkv"]


def config_of(**settings: Any) -> Any:
    from megatron.core import ModelParallelConfig

    usual = {"use_cpu_initialization": True, "params_dtype": torch.float64}
    return ModelParallelConfig(tensor_model_parallel_size=dist.get_world_size(), **(usual | settings))


def pair(name: str, group: Any) -> tuple[Any, Any]:
    """The original's layer and ours, made from the same seed."""
    arguments, settings = CASES[name]
    kind = "Row" if name.startswith("row") else "Column"
    if kind == "Row":
        arguments = {"input_is_parallel": "whole" not in name, **arguments}
    defaults = {"bias": True, "skip_bias_add": False, "config": config_of(**settings), "tp_group": group}
    made = []
    for module in (original("megatron.core.tensor_parallel.layers"), our_layers):
        torch.manual_seed(7)
        make = getattr(module, f"{kind}ParallelLinear")
        layer = make(H, OUT, init_method=nn.init.xavier_normal_, **{**defaults, **arguments})
        made.append(layer.requires_grad_("frozen" not in name))
    return made[0], made[1]


def marks_of(module: nn.Module) -> list[list[Any]]:
    return [[getattr(parameter, mark, "absent") for mark in MARKS] for parameter in module.parameters()]


def compare_megatron() -> dict[str, Any]:
    """Everything over megatron-core's parallel state; it allocates on CUDA whatever it is told."""
    state = original("megatron.core.parallel_state")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
    group = state.get_tensor_model_parallel_group()
    found: dict[str, Any] = {}
    for name, (_, settings) in CASES.items():
        theirs, ours = pair(name, group)
        dim = 0 if name.startswith("column, sequence") else None
        dim = -1 if getattr(ours, "input_is_parallel", False) else dim
        value = shard(numbers(S, B, H, seed=1).to(settings.get("params_dtype", torch.float64)), dim)
        found[name] = facts(theirs, ours, value) | {
            "marks": marks_of(theirs) == marks_of(ours),
            "master": apart(getattr(theirs, "master_weight", None), ours.master_weight) == 0,
            "state": list(theirs.state_dict()) == list(ours.state_dict()),
            "group": ours.tp_group is group,
        }
        if "bfloat16" in name:
            found[name]["apart"] = found[name]["apart"] < 5e-2
    return found | compare_embeddings(group) | carry_states(group) | compare_functions(group)


def compare_embeddings(group: Any) -> dict[str, Any]:
    theirs = original("megatron.core.tensor_parallel.layers")
    ids = torch.randint(0, OUT, (B, S), generator=torch.Generator().manual_seed(3))
    if dist.get_world_size() > 1:
        ids[0, :2] = torch.tensor([-1, OUT])  # of no rank: zeros
    found: dict[str, Any] = {}
    ranges = ("vocab_start_index", "vocab_end_index", "num_embeddings_per_partition")
    for deterministic, scattered in product((False, True), repeat=2):
        config, made = config_of(deterministic_mode=deterministic), []
        for module in (theirs, our_layers):
            torch.manual_seed(7)
            arguments = {"reduce_scatter_embeddings": scattered, "config": config, "tp_group": group}
            made.append(module.VocabParallelEmbedding(OUT, H, init_method=nn.init.normal_, **arguments))
        found[f"embedding {deterministic} {scattered}"] = facts(made[0], made[1], ids) | {
            "marks": marks_of(made[0]) == marks_of(made[1]),
            "range": all(getattr(made[0], name) == getattr(made[1], name) for name in ranges),
        }
    weight = numbers(OUT // dist.get_world_size(), H, seed=dist.get_rank()).requires_grad_()
    calls = []
    for module in (theirs, our_layers):  # a layer without a weight of its own, gathered when it is called
        arguments = {"skip_weight_param_allocation": True, "config": config_of(), "tp_group": group}
        layer = module.ColumnParallelLinear(H, OUT, init_method=nn.init.zeros_, **arguments)
        calls.append(partial(layer, weight=weight, runtime_gather_output=True))
    return found | {"shared weight": difference(calls, numbers(S, B, H, seed=1), [weight])}


def carry_states(group: Any) -> dict[str, bool]:
    """Each layer's state into the other's, and one without the extra entry."""
    found = {}
    for name in ("column", "row"):
        theirs, ours = pair(name, group)
        for source, target in ((theirs, ours), (ours, theirs)):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.normal_()
            target.load_state_dict(source.state_dict())
            same = map(torch.equal, source.parameters(), target.parameters())
            found[f"{name} into {type(target).__module__}"] = all(same)
        old = {f"0.{key}": value for key, value in ours.state_dict().items() if "extra" not in key}
        missing, unexpected = nn.Sequential(ours).load_state_dict(old)
        found[f"old {name}"] = not missing and not unexpected
    return found


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


def compare_functions(group: Any) -> dict[str, Any]:
    theirs, found = original("megatron.core.tensor_parallel.mappings"), dict[str, Any]()
    for name, (shape, arguments) in MAPPINGS.items():
        functions = [getattr(module, name.strip()) for module in (theirs, tensor_parallel)]
        calls = [partial(function, group=group, **arguments) for function in functions]
        if name == "all_to_all":  # here the group comes first
            calls = [partial(function, group) for function in functions]
        found[name] = difference(calls, numbers(*shape, seed=20 + dist.get_rank()))
    ranks, me = dist.get_world_size(), dist.get_rank()
    sent = [[i + 2 * j for j in range(ranks)] for i in range(ranks)]  # rows from rank i to rank j
    received = [row[me] for row in sent]
    calls = [partial(module.all_to_all, group) for module in (theirs, tensor_parallel)]
    calls = [partial(call, output_split_sizes_=received, input_split_sizes=sent[me]) for call in calls]
    found["all_to_all, uneven"] = difference(calls, numbers(sum(sent[me]), 2, seed=20 + me))
    return found | compare_losses(group) | compare_helpers(group)


def compare_losses(group: Any) -> dict[str, Any]:
    theirs = original("megatron.core.tensor_parallel").vocab_parallel_cross_entropy
    ours = partial(LOSS, tp_group=group)
    whole = numbers(S, B, OUT, seed=1).mul(4)
    target = torch.randint(0, OUT, (S, B), generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for smoothing in (0.0, 0.2):
            calls = [partial(loss, target=target, label_smoothing=smoothing) for loss in (theirs, ours)]
            found[f"loss {dtype} {smoothing}"] = difference(calls, shard(whole, -1).to(dtype)) < 4e-6
    value = shard(whole, -1).float()
    kept = value.clone()
    ours(value, target)
    found["loss untouched"] = torch.equal(value, kept)
    strange = target.clone()
    strange[0, 0], strange[1, 1] = -100, OUT
    found["loss of strangers"] = apart(theirs(kept.clone(), strange), ours(kept, strange)) < 4e-6
    return found


def compare_helpers(group: Any) -> dict[str, bool]:
    marked, counted = [], []
    for module in (original("megatron.core.tensor_parallel.layers"), our_layers):
        cut, plain = zeros(2), zeros(2)
        module.set_tensor_model_parallel_attributes(cut, True, 1, 2)
        marked.append(vars(cut))
        counted.append([module.param_is_not_tensor_parallel_duplicate(each, group) for each in (cut, plain)])
    return {"marks": marked[0] == marked[1], "duplicates": counted[0] == counted[1]}


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize("world_size", [2, 4])
def test_megatron_s_are_megatron_core_s(world_size: int) -> None:
    original("megatron.core.tensor_parallel")  # before the ranks are forked, once
    for rank, found in enumerate(run_ranks(world_size, compare_megatron)):
        wrong = {name: one for name, one in found.items() if not agrees(one)}
        assert not wrong, (rank, wrong)
        assert len(found) == len(CASES) + 5 + 6 + len(MAPPINGS) + 1 + 8 + 2


# --- Megatron's, where the original has nothing to compare --------------------------------------------------


def default_groups() -> list[Any]:
    """Layers and functions without a group, over the tensor-parallel half of the world; frozen weights."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    layer = COLUMN(4, 6)
    expert = COLUMN(4, 6, is_expert=True, gather_output=False)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))  # noqa: S301  our own
    for copied in copies:
        copied.load_state_dict(layer.state_dict())
    layer.weight.requires_grad_(False)
    output, bias = layer(torch.ones(2, 4))
    output.sum().backward()  # in megatron-core a bias beside a frozen weight silently does not learn
    gradient: Any
    (gradient,) = (parameter.grad for parameter in layer.parameters() if parameter.requires_grad)
    total = tensor_parallel.reduce_from_tensor_model_parallel_region(torch.tensor([float(dist.get_rank())]))
    loss = LOSS(zeros(1, 3), torch.tensor([4]))
    first = tensor_parallel.param_is_not_tensor_parallel_duplicate(zeros(1))
    found: list[Any] = [each.tp_group is group for each in (layer, *copies)]
    found.append(expert.tp_group is parallel_state.get_expert_tensor_parallel_group())
    found += [tuple(output.shape), bias, gradient.tolist(), total.item(), round(loss.item(), 4), first]
    parallel_state.destroy_model_parallel()
    return found


def test_the_group_is_the_tensor_parallel_one_unless_named_and_copies_keep_it() -> None:
    same = [True, True, True, True, (2, 6), None, [2.0] * 3]
    for rank, found in enumerate(run_ranks(4, default_groups)):
        assert found == [*same, 1.0 if rank < 2 else 5.0, 1.7918, rank % 2 == 0]


def test_the_two_generations_have_their_own_defaults() -> None:
    """Here on one rank, without ``torch.distributed``."""
    old = COLUMN(4, 6)
    new = COLUMN(4, 6, config=SimpleNamespace())
    assert (old.gather_output, new.gather_output, old.tp_group) == (True, False, None)
    output, bias = old(torch.ones(2, 4))
    assert bias is None
    torch.testing.assert_close(output, F.linear(torch.ones(2, 4), old.weight, old.bias))
    row = ROW(4, 6, skip_bias_add=True)
    assert row(torch.ones(2, 4))[1] is row.bias
    embedding = VOCABULARY(8, 4, nn.init.zeros_)
    assert embedding(torch.tensor([[7]])).tolist() == [[[0.0] * 4]]
    for config in (None, SimpleNamespace(deterministic_mode=True)):
        with pytest.raises(IndexError):
            VOCABULARY(8, 4, config=config)(torch.tensor([[8]]))
    with torch.device("meta"):
        assert ROW(4, 6).weight.is_meta
    with pytest.warns(UserWarning, match="goes on without it"):
        layer = COLUMN(4, 6, config=SimpleNamespace(sequence_parallel=True))
    assert layer.sequence_parallel is False


def test_weights_can_be_left_unfilled_or_drawn_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(perform_initialization=False)
    layer = COLUMN(4, 6, config=config, init_method=lambda _: pytest.fail("filled"))
    assert vars(layer.weight)["tensor_model_parallel"]
    monkeypatch.setattr(our_layers, "accelerator", lambda: torch.device("cpu"))
    with fake_world(2):
        arguments: dict[str, Any] = {"init_method": Tensor.normal_, "tp_group": dist.group.WORLD}
        row = ROW(6, 4, keep_master_weight_for_test=True, **arguments)
    assert row.weight.shape == (4, 3)
    assert row.weight.std() > 0
    assert row.master_weight is None


def test_shards_drawn_on_their_device_differ_between_ranks_and_layers() -> None:
    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(11)
        peers: Any = SimpleNamespace(size=2, rank=rank)
        both = zeros(5), zeros(5)
        for one in both:
            fill_shard(one, nn.init.normal_, peers)
        drawn += [tuple(one.tolist()) for one in both]
        after.append(torch.rand(3).tolist())
    assert len(set(drawn)) == 4
    assert after[0] == after[1]  # what comes later is still the same on all ranks


# --- errors -------------------------------------------------------------------------------------------------

# What a call of fairscale's and of ezpz's says.
PLAIN: dict[str, Callable[[Any], Any]] = {
    "out_features is 10, which ... 4 equal shards; ...": lambda one: one.ColumnParallelLinear(4, 10),
    "in_features is 12, ... of 2 blocks ...": lambda one: one.RowParallelLinear(12, 4, stride=2),
    "the size of dim -1 ... (2, 6) is 6, ...": lambda one: one.RowParallelLinear(4, 4)(zeros(2, 6)),
    "padding_idx must be ... from 0 to 7 or None, got 8": lambda one: one.ParallelEmbedding(
        8, 4, padding_idx=8
    ),
    "max_norm and ...": lambda one: one.VocabParallelEmbedding(8, 4, max_norm=1.0),
    "max_norm ...": lambda one: one.ParallelEmbedding(8, 4, scale_grad_by_freq=True),
    "16 is not divisible by 3; ...": lambda one: one.split_tensor_along_last_dim(zeros(2, 16), 3),
    "the target has shape (3,) and ...": lambda _: FAIRSCALE_LOSS(zeros(2, 4), zeros(3).long()),
}


@pytest.mark.parametrize("text", PLAIN)
def test_mistakes_with_plain_layers(text: str) -> None:
    with fake_world(4), started():
        for dialect in (fairscale, ezpz):
            refuses(partial(PLAIN[text], dialect), AssertionError, text)
    with fake_world(1), started():  # a whole weight has no blocks
        assert ezpz.layers.RowParallelLinear(4, 6, stride=3).weight.shape == (6, 4)


FUSED, IN_SEQUENCE = SimpleNamespace(gradient_accumulation_fusion=True), SimpleNamespace(**SEQUENCE)
MARK = our_layers.set_tensor_model_parallel_attributes
# What rank 0 of 4 says; the last four are RuntimeErrors.
MEGATRON: dict[str, Callable[[], Any]] = {
    "output_size is 10, which ... 4 equal shards; ...": lambda: COLUMN(4, 10),
    "the bias of is_expert would count ...": lambda: ROW(4, 4, is_expert=True),
    "the size of dim 0 ... (6, 2, 4) is 6, ...": lambda: ROW(
        4, 4, config=IN_SEQUENCE, input_is_parallel=True
    )(zeros(6, 2, 1)),
    "the size of dim 0 ... (5, 2, 4) is 5, ...": lambda: VOCABULARY(8, 4, reduce_scatter_embeddings=True)(
        zeros(2, 5).long()
    ),
    "the size ... (6,) is 6, ...": lambda: EXCHANGE(dist.group.WORLD, zeros(6)),
    "all_to_all was called without a group; ...": lambda: EXCHANGE(None, zeros(6)),
    "2 problems:\n ...label_smoothing must be ..., got 1.0 ...": lambda: LOSS(
        zeros(2, 4), zeros(3).long(), 1.0
    ),
    "the tensor of shape (2, 4) is marked already; ...": lambda: MARK(COLUMN(4, 8).weight, True, 0, 1),
    "ColumnParallelLinear: gradient_accumulation_fusion ...": lambda: COLUMN(4, 4, config=FUSED),
    "sequence_parallel needs ...": lambda: ROW(4, 4, config=IN_SEQUENCE),
    "ColumnParallelLinear got no weight; ... (2, 4), ...": lambda: COLUMN(
        4, 8, skip_weight_param_allocation=True
    )(zeros(1, 4)),
    "ColumnParallelLinear got a weight of ...": lambda: COLUMN(4, 8)(zeros(1, 4), weight=zeros(4, 6)),
}


@pytest.mark.parametrize("text", MEGATRON)
def test_mistakes_with_megatron_s_layers(text: str) -> None:
    kind = RuntimeError if text in [*MEGATRON][-4:] else AssertionError
    with fake_world(4):
        parallel_state.initialize_model_parallel(4, create_gloo_process_groups=False)
        refuses(MEGATRON[text], kind, text)
        parallel_state.destroy_model_parallel()
