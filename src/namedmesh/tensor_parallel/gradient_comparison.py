"""At the first backward, the ranks compare what is the same on all of them: whole parameters' gradients above all.

Where the ranks have parts of a model's features, each makes a part of the gradient of what it uses on them. Of a
parameter that is whole on every rank that part would be taken for the gradient, and the ranks would train apart
without a word. What a forward does with a parameter cannot be known from the outside; that the gradients differ can.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namedmesh._torch import at_end_of_backward, backward_pass, communicates, default_store
from namedmesh.errors import GradientError, listing, ranks_in_words
from namedmesh.tensor_parallel.collectives import RankGroup, all_gather, local_shard
from namedmesh.tensor_parallel.fingerprints import (
    ABSENT,
    COLUMNS,
    FROZEN,
    NEEDS_NONE,
    PART,
    SETTLED,
    fingerprint,
    problems_of,
    row_of,
    verdicts,
)
from namedmesh.tensor_parallel.gradient_sums import reduce_before_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

Sides: TypeAlias = tuple[str, nn.Module, bool, bool]

_EVERY_PASS = 16

BEGINNING_LIMIT = timedelta(minutes=5)
"""How long a rank waits for the others, where parameters begin to need a gradient."""

# The ranks watch the same models, in the same order.
_numbers = count()
_watched: weakref.WeakKeyDictionary[GradientComparison, None] = weakref.WeakKeyDictionary()


@cache
def _watch_optimizers() -> None:
    """Register one hook for all: torch walks through its hooks, and none may be removed while it does."""
    reduce_before_steps()
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for comparison in list(_watched):
        comparison.before_step(optimizer)


def compare_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the ranks of an axis compare, at the model's next backward, the gradients of what is whole on each of them.

    For a model that was sharded along the axis by whatever means: by ``parallelize``, which calls this itself, by torch's
    ``parallelize_module``, by hand. Compared is every trainable parameter that the axis does not shard: a plain
    tensor, or a DTensor that is replicated along it. (A gradient that is ``Partial`` is summed by whoever uses it. A
    plain tensor that is marked as a shard, with ``tensor_model_parallel``, is left out.) The ranks send five numbers
    for each, at the end of one backward. Where the gradients come later, as in the two passes of zero-bubble schedules,
    or a compiled forward has no hooks, they compare before the optimizer's step, and the error comes from there. A
    parameter that has no gradient then, a zero one, or is frozen, is compared when it has one; parameters that
    begin to need a gradient have to do so on every rank.

    Args:
        model: the model; all ranks of the axis call this, and run its forward and backward, on the same data.
        mesh: the one-dimensional mesh of the axis.

    Raises:
        GradientError: in the backward, or before the optimizer's step, on every rank: the gradients of some parameters
            differ, by name; or a parameter begins to need a gradient on some ranks only.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh.tensor_parallel import compare_gradients
        >>> mesh = namedmesh.init_mesh(tp=-1, device="cpu")
        >>> model = torch.nn.Linear(4, 4)
        >>> compare_gradients(model, mesh["tp"])
        >>> model(torch.ones(2, 4)).sum().backward()    # every rank has the same gradients
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    if mesh.size() > 1:
        GradientComparison(model, mesh, ())


class GradientComparison:
    """Watches a model until everything was compared that is to be the same on the ranks of an axis.

    Args:
        model: the model.
        mesh: the axis.
        sides: modules by name, and whether the first input and the output of each are the same on every rank.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, sides: Iterable[Sides]) -> None:
        self.model, self.group, self.device = model, RankGroup(mesh), mesh.device_type
        self.ranks = dist.get_process_group_ranks(mesh.get_group())
        self.axis = (mesh.mesh_dim_names or ("the mesh",))[0]
        self.rows: dict[tuple[str, str], list[float]] = {}
        self.dtypes: set[torch.dtype] = set()
        self.passes, self._pass, self._agreements = 0, -1, 0
        self.place = f"namedmesh/begun/{mesh.get_group().group_name}/{next(_numbers)}"
        # Those that needed no gradient on any rank when the ranks last compared.
        self.frozen: set[str] = set()
        self.handles: list[RemovableHandle] = []
        self.activations: list[tuple[str, str]] = []
        for name, module, whole_input, whole_output in sides:
            # Methods, and no closures, so that a copy of the model has a copy of this.
            if whole_input:
                self.activations.append(("input", name))
                note = partial(self._note_input, name)
                self.handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
            if whole_output:
                self.activations.append(("output", name))
                self.handles.append(module.register_forward_hook(partial(self._watch_output, name)))
        self.root_handle = model.register_forward_hook(self._after_forward)
        # Before an optimizer's step, too: where the gradients come after the backward, or without hooks.
        _watched[self] = None
        _watch_optimizers()

    @cached_property
    def parameters(self) -> dict[str, tuple[nn.Module, str]]:
        """The parameters that are still to be compared, by module and name; found when first asked, after ``fully_shard``."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        found = {}
        for name, parameter in self.model.named_parameters():
            owner, _, own_name = name.rpartition(".")
            if self._is_whole(parameter):
                found[name] = modules[owner], own_name
        return found

    # --- when -------------------------------------------------------------------------------------------------

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        _watched[self] = None  # a copy of the model has a copy of this, which is not registered
        found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not all(communicates(tensor, self.group.process_group) for tensor in found) or not self._pending():
            return
        if torch.is_autocast_enabled(self.device):
            self.dtypes.add(torch.get_autocast_dtype(self.device))
        for tensor in found:
            self.dtypes.add(tensor.dtype)
            tensor.register_hook(self._arrived)

    def _arrived(self, _gradient: Tensor) -> None:
        """Note, once a pass, that a gradient has come to the model: it is complete at the end of the pass."""
        if self._pass != backward_pass():
            self._pass = backward_pass()
            at_end_of_backward(self.after_backward)

    def _pending(self) -> bool:
        """Return whether something is still to be compared; the same on every rank, but for what has begun to be trained."""
        return bool(self._open() or self.activations or {*self.parameters} - self.frozen)

    def after_backward(self) -> None:
        """Compare what a pass has left, unless some of it never comes: then in fewer and fewer passes."""
        begun = self.frozen & {*self._open()}
        if begun:
            self._agree_on(begun)
            self.passes, self.frozen = 0, self.frozen - begun
        if self._pending():
            self.passes += 1
            if self.passes <= _EVERY_PASS or self.passes & (self.passes - 1) == 0:
                self._compare()

    def _agree_on(self, begun: set[str]) -> None:
        """Wait until every rank has the same parameters begin to need a gradient; those that have not would not compare.

        Raises:
            GradientError: after a time: some ranks have not.
        """
        self._agreements += 1
        names = listing(sorted(begun), 4)
        place = f"{self.place}/{self._agreements}/{names}"
        store, others = default_store(), [rank for rank in self.ranks if rank != dist.get_rank()]
        store.set(f"{place}/{dist.get_rank()}", "")
        with suppress(dist.DistStoreError):
            store.wait([f"{place}/{rank}" for rank in others], BEGINNING_LIMIT)
            return
        absent_ranks = [rank for rank in others if not store.check([f"{place}/{rank}"])]
        raise GradientError(
            f"{names} begins to need a gradient on rank {dist.get_rank()}, but within {BEGINNING_LIMIT} not on "
            f"{ranks_in_words(absent_ranks)}; call requires_grad_ for the same parameters on every rank of {self.axis}"
        )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what an optimizer is about to use, if it is this model's and no backward has compared it."""
        mine = {id(self._parameter(name)) for name in self.parameters}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self.after_backward()

    # --- what -------------------------------------------------------------------------------------------------

    def _open(self) -> dict[str, Tensor]:
        """Return the trainable parameters that were not compared yet."""
        found = {name: self._parameter(name) for name in self.parameters}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def _parameter(self, name: str) -> Tensor:
        module, own_name = self.parameters[name]
        parameter: Tensor = getattr(module, own_name)
        return parameter

    def _is_whole(self, parameter: Tensor) -> bool:
        if isinstance(parameter, DTensor):
            return not self._differs_along_axis(parameter)
        marks = (getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
        return not any(marks)

    def _differs_along_axis(self, tensor: DTensor) -> bool:
        """Return whether the ranks of the axis have different parts of a DTensor, or of the sum that it is."""
        # Of its own mesh, which may cut the ranks otherwise, as those of experts do.
        dims = [
            dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)
        ]
        return len(_ranks_along(tensor.device_mesh, dims) & {*self.ranks}) > 1

    def _across(self) -> list[dist.ProcessGroup]:
        """Return the groups over which parameters are sharded besides, as by FSDP2, whose ranks see other parts of them."""
        found: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for name in self.parameters:
            parameter = self._parameter(name)
            if not isinstance(parameter, DTensor):
                continue
            mesh = parameter.device_mesh
            for dim in range(mesh.ndim):
                ranks = tuple(sorted(_ranks_along(mesh, [dim])))
                if len(ranks) > 1 and ranks not in found and ranks != tuple(sorted(self.ranks)):
                    found[ranks] = mesh.get_group(dim)
        return list(found.values())

    def _note_input(
        self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        value = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if value is not None and not isinstance(value, DTensor):
            self._note(("input", name), value)

    def _watch_output(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or isinstance(output, DTensor):
            return
        if output.requires_grad:
            output.register_hook(partial(self._note, ("output", name)))

    def _note(self, key: tuple[str, str], value: Tensor) -> None:
        """Note what this rank has of an activation, the last time it comes by: a pipeline's first inputs are empty."""
        if communicates(value, self.group.process_group):
            self.rows[key] = fingerprint(local_shard(value), self.dtypes)

    def _row_of(self, key: tuple[str, str], found: Mapping[str, Tensor]) -> list[float]:
        kind, name = key
        if kind != "parameter":
            return self.rows.get(key, row_of(ABSENT))
        if name not in found:
            return row_of(NEEDS_NONE)
        gradient = found[name].grad
        if gradient is None:
            return row_of(ABSENT)
        if isinstance(gradient, DTensor) and self._differs_along_axis(gradient):
            return row_of(PART)
        return fingerprint(local_shard(gradient), self.dtypes)

    def _compare(self) -> None:
        """Let the ranks compare what they have, and note what is settled.

        Raises:
            GradientError: they have different things.
        """
        found = self._open()
        some = next(self.model.parameters(), None)
        if some is None or not communicates(some, self.group.process_group):
            return
        every = [("parameter", name) for name in self.parameters] + self.activations
        rows = [self._row_of(key, found) for key in every]
        # A pass that leaves no gradient anywhere may be one over numbers that mean nothing, as pipelines do to find shapes.
        left = any(parameter.grad is not None for parameter in self.model.parameters())
        rows.append(row_of(float(left)))
        mine = torch.tensor(rows, dtype=torch.float64, device=self.device)
        gathered = all_gather(mine.view(1, -1, COLUMNS), self.group, 0)
        self.rows.clear()
        if not gathered[:, -1, 0].any():
            return
        found_out = torch.tensor(verdicts(gathered[:, :-1]), dtype=torch.float64, device=self.device)
        for group in self._across():
            dist.all_reduce(found_out, dist.ReduceOp.MAX, group)
        outcomes = dict(zip(every, found_out.tolist(), strict=True))
        different = {key: value - SETTLED for key, value in outcomes.items() if value > SETTLED}
        if different:
            raise GradientError(*problems_of(self.model, different, self.axis, self.group.size))
        self.frozen = {name for (_, name), value in outcomes.items() if value == FROZEN}
        self._close([key for key, value in outcomes.items() if value == SETTLED])

    def _close(self, settled: Sequence[tuple[str, str]]) -> None:
        """Forget what is settled, and all activations: their contract does not change with what is trained."""
        for kind, name in settled:
            if kind == "parameter":
                del self.parameters[name]
        if settled and self.activations:
            self.activations = []
            while self.handles:
                self.handles.pop().remove()
        if not self.parameters:
            self.root_handle.remove()


def _ranks_along(mesh: DeviceMesh, dims: Sequence[int]) -> set[int]:
    """Return the ranks along some dims of a mesh, among them this one; from the mesh alone, whose groups may be gone."""
    place: list[Any] = [*(mesh.get_coordinate() or ())]
    for dim in dims:
        place[dim] = slice(None)
    return {*mesh.mesh[tuple(place)].flatten().tolist()}


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in what a module returned: a tensor, or containers of them.

    Example:
        >>> [tuple(tensor.shape) for tensor in tensors_in((torch.ones(2), {"loss": torch.ones(())}, None))]
        [(2,), ()]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))
