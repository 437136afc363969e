"""A model under a plan against the same model in one process: outputs and gradients, by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._torch import tensors_in
from namedmesh.errors import PlanError, count_of
from namedmesh.plan.tables import Table, as_text
from namedmesh.tensor_parallel.apply import parallelize
from namedmesh.tensor_parallel.plan import resolve
from namedmesh.tensor_parallel.report import dropout_note, dropouts_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from namedmesh.tensor_parallel.plan import Plan


@dataclass(frozen=True)
class Compared:
    """One thing that the two models have.

    Attributes:
        name: ``"output 0"``, ``"input 0"``, or a parameter's fully qualified name.
        what: ``"value"`` of an output, or ``"gradient"``.
        difference: the largest difference on any rank, as a part of the largest number; infinite where the shapes
            differ, or where only one model has a gradient; 0 where it is rounding of the largest gradient.
    """

    name: str
    what: str
    difference: float


@dataclass(frozen=True)
class VerifyReport:
    """What a comparison found: a table of what differs when printed.

    Attributes:
        tp_size: the number of ranks.
        compared: everything that was compared, the same on every rank.
        tolerance: how much counts as a difference.
        dropouts: the modules that drop out, which did not while the models ran.
    """

    tp_size: int
    compared: tuple[Compared, ...]
    tolerance: float
    dropouts: tuple[str, ...] = ()

    @property
    def different(self) -> tuple[Compared, ...]:
        """What differs."""
        return tuple(each for each in self.compared if not each.difference <= self.tolerance)

    @property
    def right(self) -> bool:
        """Whether nothing differs."""
        return not self.different

    def __str__(self) -> str:
        rows = tuple((each.name, each.what, f"{each.difference:.2g}") for each in self.different)
        table = f"{as_text(Table(('name', 'what', 'difference'), rows))}\n" if rows else ""
        worst = max((each.difference for each in self.compared), default=0.0)
        return (
            f"{table}{len(rows)} of {count_of(len(self.compared), 'tensor')} on {self.tp_size} ranks differ from one "
            f"process, by up to {worst:.2g} of the size{dropout_note(self.dropouts)}"
        )


@torch.inference_mode(False)
@torch.enable_grad()
def verify(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    *inputs: Any,
    tolerance: float = 1e-5,
    double: bool = True,
    **named: Any,
) -> VerifyReport:
    """Run a model whole and sharded, forward and backward, and report what differs.

    A proof on one input, of what no plan and no comparison between ranks can tell: that the ranks together compute
    what one process does. It costs two copies of the whole model in double precision on every rank: take a small one.
    The copies are in evaluation mode, draw the same random numbers, and have the parameters and inputs of the first rank;
    parameters that are all zero get numbers, because they would hide what is wrong behind them.

    Args:
        model: the model, not parallelized; it is left as it is.
        mesh: the one-dimensional mesh, of which all ranks call this.
        plan: what ``parallelize`` would get.
        *inputs: what the model is called with. Tensors of numbers with a fraction, in containers too, become
            ``float64``, and their gradients are compared.
        tolerance: the largest difference, as a part of the size of a tensor, that is none: more than double
            precision needs, for models that compute a norm or a softmax in single precision.
        double: False runs the model in its own types, where it can run in no other; with a larger tolerance.
        **named: what the model is called with by name.

    Returns:
        The report, the same on every rank.

    Raises:
        PlanError: the one that ``parallelize`` would raise; the model has no values; it returns nothing to compare.

    Example:
        A softmax over the features that a rank has is not the one over all of them; on 2 ranks the report names it:

        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, verify
        >>> mesh = namedmesh.init_mesh(tp=-1, device="cpu")
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 4))
        >>> report = verify(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}, torch.ones(2, 4))
        >>> report.right
        True
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    resolve(model, mesh, plan, None)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor):
            raise PlanError(f"{name} is on the meta device or sharded; verify a whole model that has values")
    whole = copy.deepcopy(model).eval()
    given = [each.detach().clone() for each in tensors_in((inputs, named))]
    if double:
        whole.double()
        given = [each.double() if each.is_floating_point() else each for each in given]
    for tensor in (*whole.parameters(), *whole.buffers(), *given):
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and not tensor.count_nonzero():
            nn.init.normal_(tensor, std=0.02, generator=torch.Generator(tensor.device).manual_seed(0))
        dist.broadcast(tensor.detach(), group=mesh.get_group(), group_src=0)
    sharded = parallelize(copy.deepcopy(whole), mesh, plan, check=False)
    wanted, got = (_run(each, (inputs, named), given) for each in (whole, sharded))
    gradients = [_size(value) for (_, what), value in wanted.items() if what == "gradient"]
    rounding = {"value": 0.0, "gradient": max(gradients, default=0.0) * (1e-13 if double else 1e-4)}
    names = [*(wanted | got)]
    pairs = ((got.get(key, _NONE), wanted.get(key, _NONE), rounding[key[1]]) for key in names)
    mine = torch.tensor([_difference(*pair) for pair in pairs], device=mesh.device_type)
    dist.all_reduce(mine, dist.ReduceOp.MAX, mesh.get_group())
    compared = [Compared(*key, value) for key, value in zip(names, mine.tolist(), strict=True)]
    return VerifyReport(mesh.size(), tuple(compared), tolerance, dropouts_of(model))


def _run(model: nn.Module, inputs: Any, given: list[Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return what a model makes of inputs with the given tensors in them, and the gradients of a weighted sum of it."""
    leaves = [each.clone().requires_grad_(each.is_floating_point() or each.is_complex()) for each in given]
    # A model may write into its inputs, but into no leaf.
    memo = {id(old): leaf.clone() for old, leaf in zip(tensors_in(inputs), leaves, strict=True)}
    args, named = copy.deepcopy(inputs, memo)
    device = next((each.device.type for each in given if each.device.type != "cpu"), None)
    forked = [torch.accelerator.current_device_index()] if device else []
    with torch.random.fork_rng(forked, device_type=device or "cuda"):
        torch.manual_seed(0)
        output = model(*args, **named)
    outputs = [_whole(each) for each in tensors_in(output)]
    if not outputs:
        kind = type(output).__name__
        raise PlanError(f"the output, of type {kind}, has no tensor; return tensors in plain containers")
    trained = [each for each in outputs if each.requires_grad]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(each.shape, generator=generator, dtype=each.dtype).to(each) for each in trained]
    if trained:
        torch.autograd.backward(trained, weights)
    found = {(f"output {i}", "value"): _numbers(each) for i, each in enumerate(outputs)}
    for name, each in [*((f"input {i}", leaf) for i, leaf in enumerate(leaves)), *model.named_parameters()]:
        if each.requires_grad:
            found[name, "gradient"] = _NONE if each.grad is None else _numbers(each.grad)
    return found


_NONE = torch.empty(0)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _numbers(tensor: Tensor) -> Tensor:
    """Return all numbers of a tensor, real ones, in double precision."""
    plain = _whole(tensor.detach()).to_dense()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).double()


def _size(numbers: Tensor) -> float:
    return float(numbers.abs().nan_to_num(0.0, 0.0, 0.0).max()) if numbers.numel() else 0.0


def _difference(mine: Tensor, wanted: Tensor, rounding: float) -> float:
    if mine.shape != wanted.shape:
        some = (mine.numel() and wanted.numel()) or max(_size(mine), _size(wanted)) > rounding
        return float("inf") if some else 0.0
    apart = torch.where(mine == wanted, 0.0, mine - wanted).abs()  # infinities may be the same
    if not apart.numel() or apart.max() <= rounding:
        return 0.0
    part = float(apart.max()) / max(_size(wanted), 1e-12)
    return part if part == part else float("inf")  # noqa: PLR0124  a NaN is none
