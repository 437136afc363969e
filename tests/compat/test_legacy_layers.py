"""Layers, mappings and losses of the compatibility layers, compared with upstream on every rank.

ezpz is compared with fairscale.
"""

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
from messages import check_error
from ranks import fake_world, run_ranks
from tensors import compute_difference, random_tensor, rounding_tolerance
from torch import Tensor, nn, zeros

from namedmesh.compat import fairscale
from namedmesh.compat.ezpz import tp as ezpz
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
def initialized() -> Iterator[None]:
    """Initialize fairscale and ezpz over all ranks, in double precision."""
    torch.set_default_dtype(torch.float64)
    fairscale.initialize_model_parallel(dist.get_world_size())
    ezpz.initialize_tensor_parallel(dist.get_world_size())
    try:
        yield
    finally:
        # A fake world runs in the process of the tests, whose default must not change.
        torch.set_default_dtype(torch.float32)
        fairscale.destroy_model_parallel()
        ezpz.destroy_tensor_parallel()


# --- against one process --------------------------------------------------------------------------


EMBEDDINGS: list[dict[str, Any]] = [{}, {"padding_idx": 5}, {"padding_idx": -2}, {"sparse": True}]


def compare_embedding(make: Any, dim: int, options: dict[str, Any]) -> float:
    """Return the difference to a full embedding, in output and gradient."""
    # The last four ids do not occur.
    ids = torch.randint(0, V - 4, (3, 7), generator=torch.Generator().manual_seed(1))
    layer = make(V, H, init_method=nn.init.ones_, **options)
    full = nn.Embedding(V, H, **options)
    with torch.no_grad():
        full.weight.copy_(random_tensor(V, H, seed=5))
        layer.weight.copy_(shard(full.weight, dim))
    outputs = [full(ids), layer(ids)]
    for output in outputs:
        output.backward(random_tensor(3, 7, H, seed=6))
    expected_grad = shard(full.weight.grad.to_dense(), dim)  # type: ignore[union-attr]
    return max(
        compute_difference(outputs[1], outputs[0]),
        compute_difference(layer.weight.grad.to_dense(), expected_grad),
    )


def compare_embeddings_with_full_ones() -> dict[str, float]:
    found = {}
    with initialized():
        for options in EMBEDDINGS:
            for dim, kind in enumerate((fairscale.VocabParallelEmbedding, ezpz.ParallelEmbedding)):
                found[f"{kind} {options}"] = compare_embedding(kind, dim, options)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharded_embeddings_equal_full_embeddings(world_size: int) -> None:
    """Upstream fails this test: it takes the padding id for a local id on every rank."""
    for found in run_ranks(world_size, compare_embeddings_with_full_ones):
        assert len(found) == 8
        assert agrees(found), found


# --- fairscale, and ezpz --------------------------------------------------------------------------

KEPT = {"keep_master_weight_for_test": True}
SIZES = {"ColumnParallelLinear": (H, OUT), "RowParallelLinear": (H, OUT)}
SIZES |= {"VocabParallelEmbedding": (V, H), "ParallelEmbedding": (V, H)}
# A layer, the kind of its input, and its arguments, one case each.
LAYERS: list[tuple[str, str, list[dict[str, Any]]]] = [
    (
        "ColumnParallelLinear",
        "replicated",
        [KEPT, {"gather_output": False}, {"bias": False}, {"stride": 3, **KEPT}],
    ),
    ("RowParallelLinear", "replicated", [KEPT, {"bias": False}, {"stride": 3, **KEPT}]),
    ("RowParallelLinear", "shard", [{"input_is_parallel": True}]),
    ("VocabParallelEmbedding", "ids", [{}, {"sparse": True}]),
    ("VocabParallelEmbedding", "ids outside of the vocabulary", [{}]),
    ("VocabParallelEmbedding", "ids of the first shard", [{"padding_idx": 0}]),
    ("ParallelEmbedding", "ids", [{}, {"padding_idx": 3}, {"sparse": True}]),
]
FAIRSCALE_CASES = [(kind, value, arguments) for kind, value, cases in LAYERS for arguments in cases]


def make_input(kind: str) -> Tensor:
    if kind in {"replicated", "shard"}:
        return shard(random_tensor(5, 3, H, seed=1), -1 if kind == "shard" else None)
    ids = torch.randint(0, V, (4, 6), generator=torch.Generator().manual_seed(2))
    if kind == "ids outside of the vocabulary":
        ids[0, :2] = torch.tensor([-1, V])
    if kind == "ids of the first shard":
        # Upstream takes the padding id for a local id, which is right on the first rank only.
        return ids % (V // dist.get_world_size())
    return ids


def compare_fairscale() -> dict[str, Any]:
    start, theirs = (original(f"fairscale.nn.model_parallel.{part}") for part in ("initialize", "layers"))
    start.initialize_model_parallel(dist.get_world_size())
    found: dict[str, Any] = {}
    with initialized():
        for kind, value, arguments in FAIRSCALE_CASES:
            for module in (fairscale.layers, ezpz.layers):
                layers = []
                for source in (theirs, module):
                    torch.manual_seed(7)
                    layers.append(
                        getattr(source, kind)(*SIZES[kind], init_method=nn.init.normal_, **arguments)
                    )
                upstream, ours = layers
                names = {name for name in vars(upstream) if not name.startswith("_")}
                names -= {"training", "master_weight", "norm_type"}
                same = {"attributes": all(getattr(ours, name) == getattr(upstream, name) for name in names)}
                if kind.endswith("Linear"):
                    gathered = upstream.get_master_weight(), ours.get_master_weight()
                    same["gathered"] = compute_difference(*gathered) == 0
                    kept = getattr(upstream, "master_weight", None)
                    same["master"] = compute_difference(kept, ours.master_weight) == 0
                found[f"{module.__name__} {kind} {value} {arguments}"] = same | facts(
                    upstream, ours, make_input(value)
                )
        found |= compare_mappings()
        upstream, ours = (module.ColumnParallelLinear(H, OUT) for module in (theirs, fairscale.layers))
        ours.load_state_dict(upstream.state_dict())
        copies = {"copied": copy.deepcopy(ours), "pickled": pickle.loads(pickle.dumps(ours))}  # noqa: S301  our own
        for name, layer in copies.items():
            upstream.weight.requires_grad_(False)
            layer.weight.requires_grad_(False)
            expected = results(upstream, make_input("replicated"), [upstream.bias])
            found[name] = max(
                map(compute_difference, expected, results(layer, make_input("replicated"), [layer.bias]))
            )
    start.destroy_model_parallel()
    return found


def compare_mappings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    theirs = original("fairscale.nn.model_parallel.mappings")
    for name in [name for name in dir(fairscale.mappings) if name.endswith("_model_parallel_region")]:
        value = random_tensor(3, 2, 8, seed=1 if name.startswith(("copy", "scatter")) else dist.get_rank())
        ezpz_function = getattr(ezpz.mappings, name.replace("model_parallel", "tensor_parallel"))
        for ours in (getattr(fairscale.mappings, name), ezpz_function):
            found[f"{name} {ours}"] = difference((getattr(theirs, name), ours), value)
    logits = random_tensor(3, 2, 8, seed=dist.get_rank()) * 3
    target = torch.randint(0, 8 * dist.get_world_size(), (3, 2), generator=torch.Generator().manual_seed(1))
    their_loss = original("fairscale.nn.model_parallel.cross_entropy").vocab_parallel_cross_entropy
    losses = [partial(loss, target=target) for loss in (their_loss, FAIRSCALE_LOSS)]
    found["loss"] = difference(losses, logits)
    # The sum of the exponentials, and that of the gradients.
    terms = 2 * 8 * dist.get_world_size()
    tolerance = rounding_tolerance(torch.float32, terms, float(logits.abs().max()))
    found["loss in float32"] = difference(losses, logits.float()) < tolerance
    copied = logits.clone()
    FAIRSCALE_LOSS(logits, target)
    fairscale.reduce_from_model_parallel_region(logits)
    found["inputs unchanged"] = torch.equal(logits, copied)
    return found


@pytest.mark.oracle("fairscale")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_of_fairscale_and_ezpz_equal_upstream(world_size: int) -> None:
    original("fairscale.nn.model_parallel.layers")  # imported once, before the ranks are forked
    for found in run_ranks(world_size, compare_fairscale):
        wrong = {name: result for name, result in found.items() if not agrees(result)}
        if world_size > 1:
            assert not wrong
        # On one rank, upstream's master weight is the parameter itself.
        assert all("master" in result for result in wrong.values()), wrong
        assert len(found) == 2 * len(FAIRSCALE_CASES) + 8 + 3 + 2


# --- Megatron -------------------------------------------------------------------------------------

SKIP_BIAS_ADD = {"skip_bias_add": True}
SEQUENCE, EXPERTS = {"sequence_parallel": True}, {"expert_model_parallel_size": 2, "sequence_parallel": True}
# Arguments of a layer and of its config. A row layer gets a local shard unless "replicated" is in its name.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "column": ({}, {}),
    "column, gathered": ({"gather_output": True}, {}),
    "column, no bias": ({"bias": False}, {}),
    "column, bias returned": (SKIP_BIAS_ADD, {}),
    "column, stride": ({"stride": 2, **KEPT}, {}),
    "column, unreduced": ({"disable_grad_reduce": True}, {}),
    "column, sequence": ({}, SEQUENCE),
    "column, sequence, unreduced": ({"disable_grad_reduce": True}, SEQUENCE),
    "column, expert": ({"is_expert": True}, EXPERTS),
    "row": ({}, {}),
    "row, replicated input": ({}, {}),
    "row, no bias": ({"bias": False}, {}),
    "row, bias returned": (SKIP_BIAS_ADD, {}),
    "row, stride": ({"stride": 3, **KEPT}, {}),
    "row, sequence": ({}, SEQUENCE),
    "row, sequence, bias returned": (SKIP_BIAS_ADD, SEQUENCE),
    "row, expert": ({"is_expert": True, **SKIP_BIAS_ADD}, EXPERTS),
    "column, frozen": ({}, {}),
    "column, sequence, frozen": ({}, SEQUENCE),
    "row, frozen": ({}, {}),
    "row, bfloat16": ({}, {"params_dtype": torch.bfloat16}),
}
ATTRIBUTES = ["tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"]
ATTRIBUTES += ["sequence_parallel", "expert_tp", "is_qkv"]


def make_config(**settings: Any) -> Any:
    from megatron.core import ModelParallelConfig

    usual = {"use_cpu_initialization": True, "params_dtype": torch.float64}
    return ModelParallelConfig(tensor_model_parallel_size=dist.get_world_size(), **(usual | settings))


def make_pair(name: str, group: Any) -> tuple[Any, Any]:
    """Make upstream's layer and ours from the same seed."""
    arguments, settings = CASES[name]
    kind = "Row" if name.startswith("row") else "Column"
    if kind == "Row":
        arguments = {"input_is_parallel": "replicated" not in name, **arguments}
    defaults = {"bias": True, "skip_bias_add": False, "config": make_config(**settings), "tp_group": group}
    made = []
    for module in (original("megatron.core.tensor_parallel.layers"), our_layers):
        torch.manual_seed(7)
        make = getattr(module, f"{kind}ParallelLinear")
        layer = make(H, OUT, init_method=nn.init.xavier_normal_, **{**defaults, **arguments})
        made.append(layer.requires_grad_("frozen" not in name))
    return made[0], made[1]


def get_parameter_attributes(module: nn.Module) -> list[list[Any]]:
    return [[getattr(parameter, name, "absent") for name in ATTRIBUTES] for parameter in module.parameters()]


def compare_megatron() -> dict[str, Any]:
    """Compare everything over the groups of megatron-core's parallel state."""
    state = original("megatron.core.parallel_state")
    # Upstream allocates on CUDA, whatever the config says.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
    group = state.get_tensor_model_parallel_group()
    found: dict[str, Any] = {}
    for name, (_, settings) in CASES.items():
        theirs, ours = make_pair(name, group)
        dim = 0 if name.startswith("column, sequence") else None
        dim = -1 if getattr(ours, "input_is_parallel", False) else dim
        value = shard(random_tensor(S, B, H, seed=1).to(settings.get("params_dtype", torch.float64)), dim)
        found[name] = facts(theirs, ours, value) | {
            "parameter attributes": get_parameter_attributes(theirs) == get_parameter_attributes(ours),
            "master": compute_difference(getattr(theirs, "master_weight", None), ours.master_weight) == 0,
            "state": list(theirs.state_dict()) == list(ours.state_dict()),
            "group": ours.tp_group is group,
        }
        if "bfloat16" in name:
            found[name]["apart"] = found[name]["apart"] < 5e-2
    return found | compare_embeddings(group) | exchange_states(group) | compare_functions(group)


def compare_embeddings(group: Any) -> dict[str, Any]:
    theirs = original("megatron.core.tensor_parallel.layers")
    ids = torch.randint(0, OUT, (B, S), generator=torch.Generator().manual_seed(3))
    if dist.get_world_size() > 1:
        ids[0, :2] = torch.tensor([-1, OUT])  # outside of the vocabulary: zeros
    found: dict[str, Any] = {}
    ranges = ("vocab_start_index", "vocab_end_index", "num_embeddings_per_partition")
    for deterministic, scattered in product((False, True), repeat=2):
        config, made = make_config(deterministic_mode=deterministic), []
        for module in (theirs, our_layers):
            torch.manual_seed(7)
            arguments = {"reduce_scatter_embeddings": scattered, "config": config, "tp_group": group}
            made.append(module.VocabParallelEmbedding(OUT, H, init_method=nn.init.normal_, **arguments))
        found[f"embedding {deterministic} {scattered}"] = facts(made[0], made[1], ids) | {
            "parameter attributes": get_parameter_attributes(made[0]) == get_parameter_attributes(made[1]),
            "range": all(getattr(made[0], name) == getattr(made[1], name) for name in ranges),
        }
    weight = random_tensor(OUT // dist.get_world_size(), H, seed=dist.get_rank()).requires_grad_()
    calls = []
    # A layer without a weight; its output is gathered when it is called.
    for module in (theirs, our_layers):
        arguments = {"skip_weight_param_allocation": True, "config": make_config(), "tp_group": group}
        layer = module.ColumnParallelLinear(H, OUT, init_method=nn.init.zeros_, **arguments)
        calls.append(partial(layer, weight=weight, runtime_gather_output=True))
    return found | {"shared weight": difference(calls, random_tensor(S, B, H, seed=1), [weight])}


def exchange_states(group: Any) -> dict[str, bool]:
    """Load each layer's state into the other one, and a state without the extra entry."""
    found = {}
    for name in ("column", "row"):
        theirs, ours = make_pair(name, group)
        for source, target in ((theirs, ours), (ours, theirs)):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.normal_()
            target.load_state_dict(source.state_dict())
            same = map(torch.equal, source.parameters(), target.parameters())
            found[f"{name} into {type(target).__module__}"] = all(same)
        without_extra = {f"0.{key}": value for key, value in ours.state_dict().items() if "extra" not in key}
        missing, unexpected = nn.Sequential(ours).load_state_dict(without_extra)
        found[f"{name} without extra state"] = not missing and not unexpected
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
        if name == "all_to_all":  # the group is the first argument
            calls = [partial(function, group) for function in functions]
        found[name] = difference(calls, random_tensor(*shape, seed=20 + dist.get_rank()))
    ranks, me = dist.get_world_size(), dist.get_rank()
    sent = [[i + 2 * j for j in range(ranks)] for i in range(ranks)]  # rows from rank i to rank j
    received = [row[me] for row in sent]
    calls = [partial(module.all_to_all, group) for module in (theirs, tensor_parallel)]
    calls = [partial(call, output_split_sizes_=received, input_split_sizes=sent[me]) for call in calls]
    found["all_to_all, uneven"] = difference(calls, random_tensor(sum(sent[me]), 2, seed=20 + me))
    return found | compare_losses(group) | compare_helpers(group)


def compare_losses(group: Any) -> dict[str, Any]:
    theirs = original("megatron.core.tensor_parallel").vocab_parallel_cross_entropy
    ours = partial(LOSS, tp_group=group)
    full_logits = random_tensor(S, B, OUT, seed=1).mul(4)
    target = torch.randint(0, OUT, (S, B), generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}
    # Both compute in float32 whatever the dtype of the logits, which the gradients are rounded to.
    size = float(full_logits.abs().max())
    tolerance = rounding_tolerance(torch.float32, OUT, size)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        allowed = max(tolerance, rounding_tolerance(dtype, 1, size))
        for smoothing in (0.0, 0.2):
            calls = [partial(loss, target=target, label_smoothing=smoothing) for loss in (theirs, ours)]
            found[f"loss {dtype} {smoothing}"] = difference(calls, shard(full_logits, -1).to(dtype)) < allowed
    value = shard(full_logits, -1).float()
    copied = value.clone()
    ours(value, target)
    found["logits unchanged"] = torch.equal(value, copied)
    out_of_range = target.clone()
    out_of_range[0, 0] = -100
    out_of_range[1, 1] = OUT
    expected = theirs(copied.clone(), out_of_range)
    found["loss of out-of-range ids"] = compute_difference(expected, ours(copied, out_of_range)) < tolerance
    return found


def compare_helpers(group: Any) -> dict[str, bool]:
    attributes = []
    is_counted = []
    for module in (original("megatron.core.tensor_parallel.layers"), our_layers):
        sharded = zeros(2)
        replicated = zeros(2)
        module.set_tensor_model_parallel_attributes(sharded, True, 1, 2)
        attributes.append(vars(sharded))
        is_not_duplicate = module.param_is_not_tensor_parallel_duplicate
        is_counted.append([is_not_duplicate(sharded, group), is_not_duplicate(replicated, group)])
    return {"attributes": attributes[0] == attributes[1], "duplicates": is_counted[0] == is_counted[1]}


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize("world_size", [2, 4])
def test_layers_of_megatron_equal_upstream(world_size: int) -> None:
    original("megatron.core.tensor_parallel")  # imported once, before the ranks are forked
    for rank, found in enumerate(run_ranks(world_size, compare_megatron)):
        wrong = {name: result for name, result in found.items() if not agrees(result)}
        assert not wrong, (rank, wrong)
        assert len(found) == len(CASES) + 5 + 6 + len(MAPPINGS) + 1 + 8 + 2


# --- Megatron, without an upstream result to compare with -----------------------------------------


def run_without_group_arguments() -> list[Any]:
    """Return properties of layers and functions that were not given a group, with tp=2."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    layer = COLUMN(4, 6)
    expert = COLUMN(4, 6, is_expert=True, gather_output=False)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))  # noqa: S301  our own
    for copied in copies:
        copied.load_state_dict(layer.state_dict())
    layer.weight.requires_grad_(False)
    output, bias = layer(torch.ones(2, 4))
    # In megatron-core, the bias gets no gradient if the weight is frozen.
    output.sum().backward()
    gradient: Any
    (gradient,) = (parameter.grad for parameter in layer.parameters() if parameter.requires_grad)
    total = tensor_parallel.reduce_from_tensor_model_parallel_region(torch.tensor([float(dist.get_rank())]))
    loss = LOSS(zeros(1, 3), torch.tensor([4]))
    first = tensor_parallel.param_is_not_tensor_parallel_duplicate(zeros(1))
    found: list[Any] = [copied.tp_group is group for copied in (layer, *copies)]
    found.append(expert.tp_group is parallel_state.get_expert_tensor_parallel_group())
    found += [tuple(output.shape), bias, gradient.tolist(), total.item(), round(loss.item(), 4), first]
    parallel_state.destroy_model_parallel()
    return found


def test_the_default_group_is_tensor_parallel_and_copies_keep_it() -> None:
    same = [True, True, True, True, (2, 6), None, [2.0] * 3]
    for rank, found in enumerate(run_ranks(4, run_without_group_arguments)):
        assert found == [*same, 1.0 if rank < 2 else 5.0, 1.7918, rank % 2 == 0]


def test_defaults_depend_on_whether_a_config_is_given() -> None:
    """One rank, without ``torch.distributed``."""
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
    with pytest.warns(UserWarning, match="continues without it"):
        layer = COLUMN(4, 6, config=SimpleNamespace(sequence_parallel=True))
    assert layer.sequence_parallel is False


def test_weights_are_uninitialized_or_initialized_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(perform_initialization=False)
    layer = COLUMN(4, 6, config=config, init_method=lambda _: pytest.fail("filled"))
    assert vars(layer.weight)["tensor_model_parallel"]
    monkeypatch.setattr(our_layers, "find_accelerator", lambda: torch.device("cpu"))
    with fake_world(2):
        arguments: dict[str, Any] = {"init_method": Tensor.normal_, "tp_group": dist.group.WORLD}
        row = ROW(6, 4, keep_master_weight_for_test=True, **arguments)
    assert row.weight.shape == (4, 3)
    assert row.master_weight is not None
    assert torch.equal(row.weight, row.master_weight[:, :3])
    assert row.weight.std() > 0


# --- errors ---------------------------------------------------------------------------------------

# The error of a call of fairscale and of ezpz.
FAIRSCALE_ERRORS: dict[str, Callable[[Any], Any]] = {
    "out_features is 10, which ... 4 equal shards; ...": lambda api: api.ColumnParallelLinear(4, 10),
    "in_features is 12, ... of 2 blocks ...": lambda api: api.RowParallelLinear(12, 4, stride=2),
    "the size of dim -1 ... (2, 6) is 6, ...": lambda api: api.RowParallelLinear(4, 4)(zeros(2, 6)),
    "padding_idx must be ... from 0 to 7 or None, got 8": lambda api: api.ParallelEmbedding(
        8, 4, padding_idx=8
    ),
    "max_norm and ...": lambda api: api.VocabParallelEmbedding(8, 4, max_norm=1.0),
    "max_norm ...": lambda api: api.ParallelEmbedding(8, 4, scale_grad_by_freq=True),
    "16 is not divisible by 3; ...": lambda api: api.split_tensor_along_last_dim(zeros(2, 16), 3),
    "the target has shape (3,) and ...": lambda _: FAIRSCALE_LOSS(zeros(2, 4), zeros(3).long()),
}


@pytest.mark.parametrize("text", FAIRSCALE_ERRORS)
def test_errors_of_fairscale_and_ezpz(text: str) -> None:
    with fake_world(4), initialized():
        for api in (fairscale, ezpz):
            check_error(partial(FAIRSCALE_ERRORS[text], api), AssertionError, text)
    # On one rank, the stride does not matter.
    with fake_world(1), initialized():
        assert ezpz.layers.RowParallelLinear(4, 6, stride=3).weight.shape == (6, 4)


FUSED, IN_SEQUENCE = SimpleNamespace(gradient_accumulation_fusion=True), SimpleNamespace(**SEQUENCE)
SET_ATTRIBUTES = our_layers.set_tensor_model_parallel_attributes
# The error on rank 0 of 4; the last four are RuntimeErrors.
MEGATRON_ERRORS: dict[str, Callable[[], Any]] = {
    "output_size is 10, which ... 4 equal shards; ...": lambda: COLUMN(4, 10),
    "the bias of an expert would be added ...": lambda: ROW(4, 4, is_expert=True),
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
    "the tensor of shape (2, 4) has the tensor parallel attributes already; ...": lambda: SET_ATTRIBUTES(
        COLUMN(4, 8).weight, True, 0, 1
    ),
    "ColumnParallelLinear: gradient_accumulation_fusion ...": lambda: COLUMN(4, 4, config=FUSED),
    "sequence_parallel needs ...": lambda: ROW(4, 4, config=IN_SEQUENCE),
    "ColumnParallelLinear got no weight; ... (2, 4), ...": lambda: COLUMN(
        4, 8, skip_weight_param_allocation=True
    )(zeros(1, 4)),
    "ColumnParallelLinear got a weight of ...": lambda: COLUMN(4, 8)(zeros(1, 4), weight=zeros(4, 6)),
}


@pytest.mark.parametrize("text", MEGATRON_ERRORS)
def test_errors_of_megatron(text: str) -> None:
    kind = RuntimeError if text in [*MEGATRON_ERRORS][-4:] else AssertionError
    with fake_world(4):
        parallel_state.initialize_model_parallel(4, create_gloo_process_groups=False)
        check_error(MEGATRON_ERRORS[text], kind, text)
        parallel_state.destroy_model_parallel()
