"""What an error says to do instead: each is done, and the result is that of one process."""

from __future__ import annotations

import pickle
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from messages import error_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrizations, parametrize
from tp_checks import mixture
from tp_compare import sharded, tp_mesh, training_difference, whole
from tp_models import llama_plan as llama_plan
from tp_models import UP_DOWN, Attention, FeedForward, Llama, Mlp, Net, gate_up

from namedmesh.compat.megatron.tensor_parallel import layers
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    IdentityExpert,
    KeepWhole,
    KeyValueParallel,
    RowwiseParallel,
    SequenceParallel,
    ShardedExperts,
    SharedInput,
    SumTailGradient,
    plan_from_hf,
    plan_report,
)

if TYPE_CHECKING:
    from collections.abc import Callable


Plan = dict[str, Any]
ATTENTION: Plan = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": KeyValueParallel(),
    "attention.wv": KeyValueParallel(),
    "attention.wo": RowwiseParallel(),
}
SEQUENCE, WHOLE = Shard(1), Replicate()
SEQUENCE_LLAMA = llama_plan(sequence_parallel=True)
SEQUENCE_NORM = SequenceParallel(use_local_output=True)


class Remedy(NamedTuple):
    """A plan that does not fit, the words of its error, and what they say to do."""

    model: Callable[[], nn.Module]
    plan: Plan
    words: str
    remedy: Plan
    remedied: Callable[[], nn.Module] | None = None


def without(plan: Plan, *words: str) -> Plan:
    return {key: style for key, style in plan.items() if not any(word in key for word in words)}


def normed(attention: nn.Module) -> Net:
    """Attention behind a norm, whose gradient is the sum of what the ranks make."""
    return Net(lambda m, x: x + m.attention(m.norm(x)), norm=nn.RMSNorm(32), attention=attention)


def one_kv_head() -> nn.Module:
    return normed(Attention(32, 4, 1))


def frozen_keys() -> nn.Module:
    attention = Attention(32, 4, 1)
    for layer in (attention.wk, attention.wv):
        layer.requires_grad_(False)
    return normed(attention)


def packed() -> Any:
    model: Any = gate_up(32)
    model._tp_plan = {"gate_up": "packed_colwise", "down": "rowwise"}
    return model


def latent() -> Any:
    """Keys from a latent, of which every head uses the last features directly; gates of heads, and one of all."""

    def compute(m: Any, x: Tensor) -> Any:
        hidden, tail = m.kv_a_proj(x).split([5, 2], dim=-1)
        k = m.kv_b_proj(hidden).unflatten(-1, (-1, 8)) + tail.sum(-1)[..., None, None]
        heads = torch.tanh(m.q_proj(x).unflatten(-1, (-1, 8)) * k) * m.gate(x).unsqueeze(-1)
        return m.o_proj(heads.flatten(-2)) * m.total(x).sum(-1, keepdim=True)

    widths = {"q_proj": (32, 32), "o_proj": (32, 32), "gate": (32, 4), "kv_a_proj": (32, 7)}
    widths |= {"kv_b_proj": (5, 32), "total": (32, 3)}
    model: Any = Net(compute, **{name: nn.Linear(*width) for name, width in widths.items()})
    model.n_heads, model.head_dim = 4, 8
    return model


LATENT: Plan = {
    "attention.q_proj": ColwiseParallel(),
    "attention.kv_b_proj": ColwiseParallel(),
    "attention.o_proj": RowwiseParallel(),
}


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Net(
        lambda m, ids: m.out(m.table(ids)), table=nn.Embedding(32, 32, **options), out=nn.Linear(32, 4)
    )


def parametrized() -> nn.Module:
    model = Mlp(32, 48)
    parametrizations.weight_norm(model.up)
    return model


def plain_again() -> nn.Module:
    model = parametrized()
    parametrize.remove_parametrizations(model.up, "weight")  # type: ignore[arg-type]  # a linear, to torch any module
    return model


def untied() -> nn.Module:
    model = Llama(tied=True)
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    return model


ROWS = {"table": RowwiseParallel(input_layouts=WHOLE)}
COLUMNS = {"table": ColwiseParallel(output_layouts=WHOLE)}
REMEDIES = {
    "a norm in a column style": Remedy(
        Llama,
        SEQUENCE_LLAMA | {"norm": ColwiseParallel()},
        "use SequenceParallel for a norm",
        SEQUENCE_LLAMA | {"norm": SEQUENCE_NORM},
    ),
    "an activation in a column style": Remedy(
        lambda: nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)),
        {"0": ColwiseParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()},
        "leave this module out",
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    ),
    "norms by their container": Remedy(
        Llama,
        without(SEQUENCE_LLAMA, "_norm") | {"layers.0": SequenceParallel(), "layers.1": SequenceParallel()},
        "name the inner modules",
        SEQUENCE_LLAMA | dict.fromkeys(("layers.*.attention_norm", "layers.*.ffn_norm"), SEQUENCE_NORM),
    ),
    "features that do not divide, padded": Remedy(
        lambda: Llama(hidden=47), SEQUENCE_LLAMA, "in_features 47 .*; pad it to 48$", SEQUENCE_LLAMA, Llama
    ),
    "a vocabulary that does not divide": Remedy(
        lambda: Llama(vocab=31), llama_plan(), "out_features 31 .*; pad it to 32$", llama_plan(), Llama
    ),
    "a norm between shards of the sequence": Remedy(
        Llama,
        without(SEQUENCE_LLAMA, "ffn_norm"),
        r"layers.1.ffn_norm.weight: .*on their own features or tokens only, add 'layers.0.ffn_norm': LocalParameters\(\)",
        SEQUENCE_LLAMA,
    ),
    "keys left out": Remedy(
        one_kv_head,
        without(ATTENTION, "wk", "wv"),
        r"attention.wk.weight, attention.wv.weight: .*KeyValueParallel\(\)",
        ATTENTION,
    ),
    "frozen keys left out": Remedy(
        frozen_keys,
        without(ATTENTION, "wk", "wv"),
        r"norm.weight: .*KeyValueParallel\(\)",
        ATTENTION,
    ),
    "keys cut through a head": Remedy(
        one_kv_head,
        ATTENTION | dict.fromkeys(("attention.wk", "attention.wv"), ColwiseParallel()),
        r"give them KeyValueParallel\(\)",
        ATTENTION,
    ),
    "linears left out of attention": Remedy(
        lambda: normed(latent()),
        LATENT | {"attention.gate": ColwiseParallel()},
        r"kv_a_proj.*SumTailGradient\(width\) if all use its last width features",
        LATENT
        | {
            "attention.gate": ColwiseParallel(),
            "attention.kv_a_proj": SumTailGradient(2),
            "attention.total": KeepWhole(),
        },
    ),
    "gate|up in a column style": Remedy(
        packed,
        {"gate_up": ColwiseParallel(), "down": RowwiseParallel()},
        r"FusedColwiseParallel\(blocks=...\)",
        {"gate_up": FusedColwiseParallel(blocks=2), "down": RowwiseParallel()},
    ),
    "max_norm": Remedy(embedding(max_norm=1.0), ROWS, "use max_norm=None", ROWS, embedding()),
    "sparse": Remedy(embedding(sparse=True), ROWS, "use sparse=False", ROWS, embedding(sparse=False)),
    "scaled gradients": Remedy(
        embedding(scale_grad_by_freq=True), ROWS, "use ColwiseParallel, or scale_grad_by_freq=False", COLUMNS
    ),
    "unscaled gradients": Remedy(
        embedding(scale_grad_by_freq=True), ROWS, "or scale_grad_by_freq=False", ROWS, embedding()
    ),
    "tied, laid out alike": Remedy(
        lambda: Llama(tied=True),
        llama_plan() | {"tok_embeddings": ColwiseParallel(output_layouts=WHOLE)},
        "RowwiseParallel for an embedding and ColwiseParallel for the output head",
        llama_plan(),
    ),
    "tied, untied": Remedy(
        lambda: Llama(tied=True),
        llama_plan() | {"tok_embeddings": ColwiseParallel(output_layouts=WHOLE)},
        "or untie them first",
        llama_plan() | {"tok_embeddings": ColwiseParallel(output_layouts=WHOLE)},
        untied,
    ),
    "parametrized": Remedy(parametrized, UP_DOWN, "remove_parametrizations", UP_DOWN, plain_again),
    "parametrized, left out": Remedy(
        parametrized,
        {"up": ColwiseParallel(output_layouts=WHOLE)},
        "leave the module out",
        {},
    ),
    "a shared input, gathered again": Remedy(
        Llama,
        SEQUENCE_LLAMA | {"layers.*.feed_forward.w1": ColwiseParallel(input_layouts=SEQUENCE)},
        r"^PlanError: layers.0.feed_forward.w1: the input is laid out as Shard\(1\) by this style, but a SharedInput above has made "
        r"it whole; leave input_layouts at Replicate\(\), or take the SharedInput out of the plan$",
        SEQUENCE_LLAMA | {"layers.*.feed_forward.w1": ColwiseParallel(input_layouts=WHOLE)},
    ),
    "a shared input taken out": Remedy(
        lambda: FeedForward(32, 48),
        {"": SharedInput(input_layouts=SEQUENCE)}
        | dict.fromkeys(("w1", "w3"), ColwiseParallel(input_layouts=SEQUENCE))
        | {"w2": RowwiseParallel(output_layouts=SEQUENCE)},
        "take the SharedInput out",
        dict.fromkeys(("w1", "w3"), ColwiseParallel()) | {"w2": RowwiseParallel()},
    ),
}


def given(model: nn.Module) -> Tensor:
    """Ids for a model with an embedding, or else activations."""
    generator = torch.Generator().manual_seed(0)
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is not None:
        return torch.randint(0, 32, (2, 8), generator=generator)
    return torch.randn(2, 8, 32, dtype=torch.float64, generator=generator)


def follow(remedy: Remedy) -> tuple[str, float]:
    """The error, and how far training is from that of one process after the remedy."""
    torch.manual_seed(0)
    model = remedy.model().double()
    text = error_of(lambda: sharded(model, remedy.plan)(given(model)).square().sum().backward())
    torch.manual_seed(0)
    reference = (remedy.remedied or remedy.model)()
    for parameter in reference.parameters():  # a norm of ones would hide what it does
        nn.init.uniform_(parameter, -0.3, 0.3)
    reference = reference.double()
    right = sharded(reference, remedy.remedy)
    return text, training_difference(right, reference, given(reference), steps=2)


# --- what is no plan of a model ------------------------------------------------------------------------------


def second_derivative() -> tuple[str, float]:
    """A penalty on the gradient of what is between two networks, of which the first is sharded."""
    reference = nn.ModuleList([Mlp(32, 48), Mlp(32, 48)]).double()

    def penalize(model: nn.Module) -> list[Tensor]:
        first, second = model.children()
        hidden = first(given(reference))
        (gradient,) = torch.autograd.grad(second(hidden).square().sum(), hidden, create_graph=True)
        gradient.square().sum().backward()
        return [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

    text = error_of(
        lambda: penalize(sharded(reference, {f"*.{name}": style for name, style in UP_DOWN.items()}))
    )
    model = sharded(reference, {f"0.{name}": style for name, style in UP_DOWN.items()})
    pairs = zip(penalize(model), penalize(reference), strict=True)
    return text, float(max((one - other).abs().max() for one, other in pairs))


def packed_columns() -> tuple[str, float]:
    reference = packed().double()
    text = error_of(lambda: plan_from_hf(reference._tp_plan))
    return text, training_difference(sharded(reference, plan_from_hf(reference)), reference, given(reference))


def removed_entry() -> tuple[str, float]:
    reference = Llama().double()
    stated = {f"layers.*.feed_forward.w{i}": "rowwise" if i == 2 else "colwise" for i in (1, 2, 3)}
    text = error_of(lambda: plan_from_hf(stated | {"layers.*.attention": "grouped_gemm"}))
    return text, training_difference(sharded(reference, plan_from_hf(stated)), reference, given(reference))


def destroyed_group() -> tuple[str, float]:
    def make() -> layers.ColumnParallelLinear:
        options: dict[str, Any] = {"bias": False, "init_method": nn.init.ones_, "tp_group": dist.new_group()}
        return layers.ColumnParallelLinear(32, 8, **options).double()

    x, layer = given(nn.Linear(1, 1)), make()
    dist.destroy_process_group(layer.tp_group)
    text = error_of(lambda: layer(x))
    found = make()(x)[0].detach()
    return text, float((found - x.sum(-1, keepdim=True)).abs().max())


def pickled_layer() -> tuple[str, float]:
    make = partial(layers.RowParallelLinear, 32, 8, input_is_parallel=True, tp_group=dist.group.WORLD)
    layer, other = make(), make()
    text = error_of(lambda: pickle.dumps(layer))
    sent = pickle.dumps(layer.state_dict())
    other.load_state_dict(pickle.loads(sent))  # noqa: S301  our own
    x = torch.ones(4, 16)
    return text, float((layer(x)[0] - other(x)[0]).detach().abs().max())


def whole_experts() -> tuple[str, float]:
    """Experts of which one weight is whole on every rank."""
    reference = mixture().double()
    for parameter in reference.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    text = error_of(lambda: plan_report(reference, tp_mesh(), {"experts": ShardedExperts({"up": Shard(1)})}))
    plan = {"experts": ShardedExperts({"up": Shard(1), "down": Shard(2)}), "experts.same": IdentityExpert()}
    model = sharded(reference, plan)
    data = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return text, training_difference(model, reference, data)


OTHERS: dict[str, tuple[Callable[[], tuple[str, float]], str]] = {
    "a second derivative": (
        second_derivative,
        "no second derivative, .* create_graph=True; leave the layers that it passes through out of the plan$",
    ),
    "packed columns": (packed_columns, "'gate_up': .*: pass the model"),
    "another style": (removed_entry, "'grouped_gemm' .*; change or remove"),
    "a destroyed group": (destroyed_group, "make the layer again on a mesh that is open"),
    "a pickled layer": (
        pickled_layer,
        r"save the layer's state_dict\(\), and load it into a layer made where",
    ),
    "experts that are whole": (whole_experts, "name a layout"),
}


def all_followed() -> dict[str, tuple[str, float]]:
    found = {name: follow(remedy) for name, remedy in REMEDIES.items()}
    return found | {name: call() for name, (call, _) in OTHERS.items()}


@pytest.fixture(scope="module")
def followed() -> list[dict[str, tuple[str, float]]]:
    return run_ranks(2, all_followed)


@pytest.mark.parametrize(
    ("name", "words"),
    [(name, remedy.words) for name, remedy in REMEDIES.items()]
    + [(name, words) for name, (_, words) in OTHERS.items()],
)
def test_the_remedy_of_an_error_gives_what_one_process_has(
    name: str, words: str, followed: list[dict[str, tuple[str, float]]]
) -> None:
    for found in followed:
        text, difference = found[name]
        assert re.search(words, text), text
        assert difference < 1e-10
