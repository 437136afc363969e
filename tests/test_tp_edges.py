"""Modules, tensors and devices that are not the usual ones: exact, or refused before anything changes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import fake_world, run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from tp_compare import apart, assert_right, gradients_apart, problem_of, sharded, tp_mesh, whole
from tp_models import llama_plan as llama_plan
from tp_models import TORCHS_NORMS, UP_DOWN, Llama, Mlp

from namedmesh._torch import TORCH
from namedmesh.errors import MeshError, PlanError, ShapeError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SharedInput,
    parallelize,
    reduce_gradients,
)
from namedmesh.tensor_parallel.collectives import (
    RankGroup,
    all_gather,
    all_reduce,
    gather,
    reduce_scatter,
    split,
    sum_forward,
    sum_scatter,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

WHOLE = Replicate()
SEQUENCE_PAIR: dict[str, Any] = {
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def differences(model: nn.Module, reference: nn.Module, given: Tensor, mine: Tensor | None = None) -> float:
    """How far outputs and gradients are from those of one process."""
    got, wanted = whole(model(given if mine is None else mine)), reference(given)
    for out in (got, wanted):
        out.abs().square().sum().backward()
    return max(apart(got, wanted), gradients_apart(model, reference))


# --- numbers ------------------------------------------------------------------------------------------------


def numbers() -> dict[str, float]:
    torch.manual_seed(0)
    found = {}
    dtypes = {"real": torch.float64, "complex": torch.complex128}
    if TORCH.release < (2, 9):
        del dtypes["complex"]  # gloo cannot hand out parts of such a weight there
    for name, dtype in dtypes.items():
        reference = Mlp()
        reference.up, reference.down = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 8, dtype=dtype)
        for layout, plan in (("whole", UP_DOWN), ("shared", UP_DOWN | {"": SharedInput()})):
            model = sharded(reference, plan)
            reference.zero_grad()
            found[f"{name}, {layout}"] = differences(model, reference, torch.randn(4, 6, 8, dtype=dtype) / 8)
    empty = torch.randn(0, 6, 8, dtype=torch.float64)
    for plan in (UP_DOWN, UP_DOWN | {"": SharedInput()}):
        reference = Mlp().double()
        model = sharded(reference, plan)
        value = empty.clone().requires_grad_()
        found[f"empty, {len(plan)}"] = differences(model, reference, empty, value)
        assert value.grad is not None
        assert value.grad.shape == empty.shape
    no_tokens = torch.zeros(2, 0, dtype=torch.long)
    for sequence in (False, True):
        model = parallelize(Llama(layers=1), tp_mesh(), llama_plan(sequence_parallel=sequence))
        model(no_tokens).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    return found


def test_complex_layers_and_empty_batches() -> None:
    assert_right(run_ranks(2, numbers))


def conjugated() -> list[float]:
    """Tensors of which the memory does not hold the values: a conjugate, and a negative."""
    peers = RankGroup(torch.distributed.group.WORLD)
    value = torch.arange(4).to(torch.complex128) + 1j * (1 + peers.rank)
    conjugate, negative = value.conj(), value.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    made = [
        (all_reduce(conjugate, peers), 2 * torch.arange(4) - 3j),
        (all_reduce(negative, peers), torch.full((4,), -3.0)),
        (all_gather(negative, peers, 0), torch.tensor([-1.0] * 4 + [-2.0] * 4)),
        (reduce_scatter(negative, peers, 0), torch.full((2,), -3.0)),
    ]
    return [(one - other).abs().max().item() for one, other in made]


def test_conjugates_and_negatives_are_sent_as_what_they_mean() -> None:
    for found in run_ranks(2, conjugated):
        assert max(found) == 0


def uneven() -> list[float]:
    """DTensors of a length that the ranks do not divide, which torch pads and a collective of ours may not get."""
    torch.manual_seed(0)
    found = []
    for plan in (
        UP_DOWN,
        {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()},
        {"up": RowwiseParallel(), "down": ColwiseParallel(output_layouts=WHOLE)},
        UP_DOWN | {"": SharedInput()},
        UP_DOWN | {"": SharedInput(input_layouts=Shard(1))},
    ):
        reference = Mlp().double()
        model = sharded(reference, plan)
        x = torch.randn(2, 7, 8, dtype=torch.float64)
        for layout in (Shard(1), Shard(0), WHOLE):
            reference.zero_grad()
            model.zero_grad()
            placed = distribute_tensor(x, tp_mesh(), [layout], src_data_rank=None)
            found.append(differences(model, reference, x, placed))
    return found


def test_dtensors_of_uneven_shards() -> None:
    assert_right(run_ranks(2, uneven), cases=15)


def too_many_features() -> str:
    layer = nn.ModuleDict({"out": nn.Linear(64, 8)})
    model = parallelize(layer, tp_mesh(), {"out": RowwiseParallel(input_layouts=WHOLE)})
    with pytest.raises(ShapeError) as caught:
        model["out"](torch.zeros(2, 65))  # type: ignore[index]
    return str(caught.value)


def test_a_row_layer_refuses_another_number_of_features() -> None:
    text = "out: the input, of shape (2, 65), has 65 features, but the layer takes 64; pass all 64 of them"
    assert run_ranks(2, too_many_features) == [text] * 2


# --- one rank -----------------------------------------------------------------------------------------------


def in_place() -> bool:
    """What a function returns can be written into, on one rank as on several."""
    mesh, peers = tp_mesh(), RankGroup(tp_mesh())
    plan = {"up": ColwiseParallel(output_layouts=WHOLE), "down": RowwiseParallel(input_layouts=WHOLE)}
    for style in (plan, UP_DOWN, SEQUENCE_PAIR, UP_DOWN | {"": SharedInput()}):
        model = parallelize(Mlp(), mesh, style)
        model(torch.ones(2, 4, 8)).mul_(2).sum().backward()
        hidden = model.up(torch.ones(2, 4, 8))  # type: ignore[operator]
        hidden.add_(1).sum().backward()
    x = torch.ones(2, 4, requires_grad=True)
    outputs = (
        sum_forward(x * 1, peers),
        gather(x * 1, peers, 1),
        split(x * 1, peers, 1),
        sum_scatter(x * 1, peers, 1),
    )
    for output in outputs:
        output.mul_(2).sum().backward()
    return True


@pytest.mark.parametrize("tp_size", [1, 2])
def test_outputs_can_be_written_into(tp_size: int) -> None:
    assert all(run_ranks(tp_size, in_place))


# --- no numbers ---------------------------------------------------------------------------------------------


def step_without_numbers(kind: str, sequence: bool) -> None:
    plan = llama_plan(sequence_parallel=sequence)
    with fake_world(4):
        mesh = tp_mesh()
        with torch.device("meta") if kind == "meta" else FakeTensorMode():
            model, ids = Llama(), torch.zeros(2, 8, dtype=torch.long)
            logits = parallelize(model, mesh, plan, src_data_rank=None)(ids)
            logits.sum().backward()
        assert logits.is_meta == (kind == "meta")
        assert logits.shape == (2, 8, 32)
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_forward_and_backward_without_numbers(kind: str, sequence: bool) -> None:
    run_ranks(1, step_without_numbers, kind, sequence, init=False)  # no backward in the process that forks


# --- modules ------------------------------------------------------------------------------------------------


class Dropped(nn.Linear):
    """A linear with a module inside that has no weight, and one that has."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.dropout, self.norm = nn.Dropout(0.0), nn.LayerNorm(inputs)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        return self.dropout(super().forward(self.norm(input)))  # type: ignore[no-any-return]


def modules() -> dict[str, float]:
    styles = {
        "columns": ColwiseParallel(output_layouts=WHOLE),
        "rows": RowwiseParallel(input_layouts=WHOLE),
    }
    found = {}
    for kind, style in styles.items():
        reference = nn.Sequential(Dropped(8, 8).double())
        model = sharded(reference, {"0": style})
        found[kind] = differences(model, reference, torch.randn(4, 8, dtype=torch.float64))
    return found


def test_subclasses_with_children() -> None:
    assert_right(run_ranks(2, modules), cases=2)


def encoders() -> list[float]:
    """In evaluation torch would hand the weights to a native function, and make nested tensors of what is not padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    reference = nn.TransformerEncoder(layer, 2).eval()
    plan = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    model = sharded(reference, plan)
    x, padding = torch.randn(2, 4, 8, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 2:] = True
    found = []
    with torch.no_grad():
        for each in (model, copy.deepcopy(model)):
            found.append(apart(each.layers[0](x), reference.layers[0](x)))
            got, wanted = (one(x, src_key_padding_mask=padding)[~padding] for one in (each, reference))
            found.append(apart(got, wanted))
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the whole model
def test_encoders_in_evaluation() -> None:
    assert_right(run_ranks(2, encoders), cases=4)


def transformed() -> list[str]:
    model = parallelize(Mlp().double(), tp_mesh(), UP_DOWN)
    x = torch.randn(4, 8, dtype=torch.float64)
    texts = []
    for transform in (torch.func.grad(lambda x: model(x).sum()), torch.func.vmap(model)):
        with pytest.raises(MeshError) as caught:
            transform(x)
        texts.append(str(caught.value))
    return texts


def test_transforms_of_functions_are_refused() -> None:
    for texts in run_ranks(2, transformed):
        assert all("torch.func" in text and "out of the plan" in text for text in texts)


class Failing(ParallelStyle):
    """A style that starts, and fails."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  torch's signature
        module.register_buffer("left", torch.zeros(1))
        raise ZeroDivisionError("of somebody else's style")


def failing_style() -> None:
    with fake_world(2):
        model = Llama(tied=True)
        before = dict(model.named_parameters())
        kinds = [type(module) for module in model.modules()]
        plan = llama_plan(sequence_parallel=True) | {"layers.*.attention_norm": Failing()}
        with pytest.raises(ZeroDivisionError):
            parallelize(model, tp_mesh(), plan)
        after = dict(model.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items())
        assert list(after) == list(before)
        assert [type(module) for module in model.modules()] == kinds
        assert not list(model.buffers())
        assert model.output.weight is model.tok_embeddings.weight
        parallelize(model, tp_mesh(), llama_plan(sequence_parallel=True))
        assert all(isinstance(p, DTensor) for name, p in model.named_parameters())


def test_nothing_is_left_half_sharded() -> None:
    run_ranks(1, failing_style, init=False)


def test_what_reads_or_hooks_a_weight_is_refused() -> None:
    model: Any = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 8), "after": nn.Linear(8, 8)}
    )
    model["up"].weight.register_hook(lambda gradient: gradient)
    model["after"].bias.register_post_accumulate_grad_hook(lambda _: None)
    text = problem_of(
        model, {"attention.out_proj": RowwiseParallel(), "up": ColwiseParallel(), "after": ColwiseParallel()}
    )
    assert "attention.out_proj: nn.MultiheadAttention computes with its weight and does not call it" in text
    assert "up: weight has a hook" in text
    assert "after: bias has a hook" in text


def test_what_is_noted_on_a_parameter_is_kept() -> None:
    layer: Any = nn.Linear(8, 8)
    layer.weight._no_weight_decay = True
    with fake_world(2):
        parallelize(layer, tp_mesh(), ColwiseParallel(), src_data_rank=None)
    assert isinstance(layer.weight, DTensor)
    assert vars(layer.weight)["_no_weight_decay"]


def test_a_computed_weight_is_refused() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.utils.weight_norm(nn.Linear(8, 8))
    new, of_bias = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(of_bias, "bias", nn.Tanh())
    for layer in (new, old, of_bias):
        with fake_world(2), pytest.raises(PlanError) as caught:
            ColwiseParallel()._apply(layer, tp_mesh())
        assert str(caught.value) == (
            f"{type(layer).__name__}: its {'bias' if layer is of_bias else 'weight'} is computed from other parameters at every forward; remove the "
            "parametrization (torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm), "
            "or leave the module out of the plan"
        )


# --- norms of torch's SequenceParallel -------------------------------------------------------------------------


def surviving() -> dict[str, float]:
    """The gradients of norms are whole after everything that replaces parameters."""
    torch.manual_seed(0)
    reference = Llama(layers=1)

    def fresh() -> Any:
        return sharded(reference, llama_plan(sequence_parallel=True) | TORCHS_NORMS)

    state = {name: value.detach().clone() for name, value in fresh().state_dict().items()}

    def emptied() -> Any:
        model = fresh().to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state[name])
        return model

    def assigned() -> Any:
        model = fresh()
        model.load_state_dict(state, assign=True)
        return model.requires_grad_()

    makers: dict[str, Callable[[], nn.Module]] = {
        "fresh": fresh,
        "to_empty": emptied,
        "deepcopy": lambda: copy.deepcopy(fresh()),
        "assign": assigned,
        "double": lambda: fresh().to(torch.float64),
    }
    found = {}
    ids = torch.randint(0, 32, (2, 8))
    for name, make in makers.items():
        model, other = make(), copy.deepcopy(reference)
        other = other.double() if name == "double" else other
        found[name] = differences(model, other, ids)
        reduce_gradients(model)
        norm = model.norm.weight.grad  # type: ignore[union-attr]
        assert isinstance(norm, DTensor)
        assert norm.placements == (WHOLE,)
    return found


def test_norm_gradients_are_summed_whatever_replaced_the_parameters() -> None:
    assert_right(run_ranks(2, surviving), 1e-4, cases=5)
