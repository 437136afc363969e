"""A model under a plan against the same model in one process: outputs and gradients, by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh.errors import count_of
from namedmesh.plan.tables import Table, as_text
from namedmesh.tensor_parallel.apply import parallelize
from namedmesh.tensor_parallel.gradient_comparison import tensors_in
from namedmesh.tensor_parallel.report import dropout_note, dropouts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from namedmesh.tensor_parallel.plan import Plan


@dataclass(frozen=True)
class Compared:
    """One thing that the two models have.

    Attributes:
        name: ``"output 0"``, ``"input 0"``, or a parameter's fully qualified name.
        what: ``"value"`` of an output, or ``"gradient"``.
        difference: the largest difference on any rank, as a part of the largest number; infinite where the shapes
            differ, or where only one model has a gradient.
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
        lines = []
        if self.different:
            rows = tuple((each.name, each.what, f"{each.difference:.2g}") for each in self.different)
            lines.append(as_text(Table(("name", "what", "difference"), rows)))
        worst = max((each.difference for each in self.compared), default=0.0)
        lines.append(
            f"{len(self.different)} of {count_of(len(self.compared), 'tensor')} on {self.tp_size} ranks differ from one "
            f"process, by up to {worst:.2g} of the size"
        )
        return "\n".join(lines) + dropout_note(self.dropouts)


def verify(
    model: nn.Module, mesh: DeviceMesh, plan: Plan, *inputs: Any, tolerance: float = 1e-5
) -> VerifyReport:
    """Run a model whole and sharded, forward and backward, and report what differs.

    A proof on one input, of what no plan and no comparison between ranks can tell: that the ranks together compute
    what one process does. It costs two copies of the whole model in double precision on every rank: take a small one.
    The copies are in evaluation mode, so that nothing is random, and have the parameters and inputs of the first rank;
    parameters that are all zero get numbers, because they would hide what is wrong behind them.

    Args:
        model: the model, not parallelized; it is left as it is.
        mesh: the one-dimensional mesh, of which all ranks call this.
        plan: what ``parallelize`` would get.
        *inputs: what the model is called with. Tensors of numbers with a fraction become ``float64``, and their
            gradients are compared.
        tolerance: the largest difference, as a part of the size of a tensor, that is none: more than double
            precision needs, for models that compute a norm or a softmax in single precision.

    Returns:
        The report, the same on every rank.

    Raises:
        PlanError: the one that ``parallelize`` would raise.

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
    whole = copy.deepcopy(model).double().eval()
    group, given = mesh.get_group(), [*inputs]
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor):
            dtype = torch.float64 if value.is_floating_point() else value.dtype
            given[i] = value.detach().to(dtype, copy=True)
    for tensor in (*whole.parameters(), *whole.buffers(), *given):
        if isinstance(tensor, nn.Parameter) and not tensor.count_nonzero():
            nn.init.normal_(tensor, std=0.02)
        if isinstance(tensor, Tensor):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
    sharded = parallelize(copy.deepcopy(whole), mesh, plan, check=False)
    wanted, got = _run(whole, given), _run(sharded, given)
    names = [*(wanted | got)]
    differences = [_difference(got.get(key), wanted.get(key)) for key in names]
    mine = torch.tensor(differences, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(mine, dist.ReduceOp.MAX, group)
    compared = [Compared(*key, value) for key, value in zip(names, mine.tolist(), strict=True)]
    return VerifyReport(mesh.size(), tuple(compared), tolerance, dropouts_of(model))


def _run(model: nn.Module, given: Sequence[Any]) -> dict[tuple[str, str], Tensor | None]:
    """Return the outputs of a model, and the gradients of a loss that weights each number of them differently."""
    inputs = [*given]
    for i, value in enumerate(given):
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs[i] = value.clone().requires_grad_()
    copies = [
        value.clone() if isinstance(value, Tensor) else value for value in inputs
    ]  # a model may write into them
    outputs = [_whole(tensor) for tensor in tensors_in(model(*copies)) if tensor.dtype.is_floating_point]
    found: dict[tuple[str, str], Tensor | None] = {}
    for i, output in enumerate(outputs):
        found[f"output {i}", "value"] = output.detach()
    trained = [output for output in outputs if output.requires_grad]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each) for each in trained]
    if trained:
        torch.autograd.backward(trained, weights)
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.requires_grad:
            found[f"input {i}", "gradient"] = value.grad
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name, "gradient"] = None if parameter.grad is None else _whole(parameter.grad)
    return found


def _whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def _difference(mine: Tensor | None, wanted: Tensor | None) -> float:
    if mine is None or wanted is None:
        other = wanted if mine is None else mine
        return float("inf") if other is not None and other.count_nonzero() else 0.0
    if mine.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    apart = float((mine - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    return apart if apart == apart else float("inf")  # noqa: PLR0124  a NaN is none
