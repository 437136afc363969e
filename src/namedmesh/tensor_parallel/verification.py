"""A model under a plan against the same model in one process: outputs and gradients, by name."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._torch import tensors_in
from namedmesh.errors import PlanError, count_of
from namedmesh.tensor_parallel.apply import parallelize
from namedmesh.tensor_parallel.plan import resolve
from namedmesh.tensor_parallel.report import dropout_note, dropouts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from namedmesh.tensor_parallel.plan import Plan


@dataclass(frozen=True)
class VerifyReport:
    """What a comparison found: a line for each thing that differs when printed.

    Attributes:
        tp_size: the number of ranks.
        compared: the names of everything that was compared: ``"output 0"``, ``"gradient of input 0"``,
            ``"gradient of layers.0.weight"``.
        different: of those that differ, on which rank and how far, the same on every rank.
        dropouts: the modules that drop out, which did not while the models ran.
    """

    tp_size: int
    compared: tuple[str, ...]
    different: dict[str, str]
    dropouts: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """Whether nothing differs."""
        return not self.different

    def __str__(self) -> str:
        lines = [f"{name}: {text}" for name, text in self.different.items()]
        total = f"{len(lines)} of {count_of(len(self.compared), 'tensor')} on {self.tp_size} ranks differ from one process"
        return "\n".join([*lines, total]) + dropout_note(self.dropouts)


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
        tolerance: the largest difference, as a part of the largest number of a tensor, that is none: more than double
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
    resolve(model, mesh, plan)
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
    largest = max((_size(each) for name, each in wanted.items() if "gradient" in name), default=0.0)
    rounding = largest * (1e-13 if double else 1e-4)
    names = [*(wanted | got)]
    mine = {}
    for name in names:
        text = _difference(got.get(name), wanted.get(name), tolerance, rounding)
        if text:
            mine[name] = f"on rank {dist.get_rank()}, {text}"
    of_all: list[Any] = [None] * mesh.size()
    dist.all_gather_object(of_all, mine, mesh.get_group())
    found = {name: "; ".join(each[name] for each in of_all if name in each) for name in names}
    different = {name: text for name, text in found.items() if text}
    return VerifyReport(mesh.size(), tuple(names), different, dropouts_of(model))


def _run(model: nn.Module, inputs: Any, given: list[Tensor]) -> dict[str, Tensor]:
    """Return what a model makes of inputs with the given tensors in them, and the gradients of a weighted sum of it."""
    leaves = [each.clone().requires_grad_(each.is_floating_point() or each.is_complex()) for each in given]
    # A model may write into its inputs, but into no leaf.
    memo = {id(old): leaf.clone() for old, leaf in zip(tensors_in(inputs), leaves, strict=True)}
    args, named = copy.deepcopy(inputs, memo)
    with _same_random_numbers():
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
    found = {f"output {i}": each.detach() for i, each in enumerate(outputs)}
    for name, each in [*((f"input {i}", leaf) for i, leaf in enumerate(leaves)), *model.named_parameters()]:
        if each.grad is not None:
            found[f"gradient of {name}"] = _whole(each.grad.detach())
    return found


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Draw from a fixed seed in the block, on all devices, and go on afterwards as if nothing had been drawn."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if device is None else [*range(torch.accelerator.device_count())]
    with torch.random.fork_rng(devices, device_type="cuda" if device is None else device.type):
        torch.manual_seed(0)
        yield


def _whole(tensor: Tensor) -> Tensor:
    plain: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return plain.to_dense()


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _difference(mine: Tensor | None, wanted: Tensor | None, tolerance: float, rounding: float) -> str:
    """Return how far a tensor is from the one of one process; nothing where it is near enough."""
    if mine is None or wanted is None:
        one = mine if wanted is None else wanted
        absent = "one process has one, this model does not" if mine is None else "one process has none"
        return absent if one is not None and _size(one) > rounding else ""
    if mine.shape != wanted.shape and mine.numel() == wanted.numel():
        mine = mine.reshape(wanted.shape)  # fused experts have a dim more
    size = _size(wanted)
    try:
        torch.testing.assert_close(mine, wanted, rtol=0, atol=max(tolerance * size, rounding), equal_nan=True)
    except AssertionError as error:
        if mine.shape == wanted.shape and mine.isfinite().all() and mine.is_floating_point():
            return f"{_size(mine - wanted) / max(size, 1e-12):.2g} of the size apart"
        return " ".join(str(error).split())
    return ""
