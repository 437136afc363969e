"""At the first backward, the ranks compare what is the same on all of them: whole parameters' gradients above all.

Where the ranks have parts of a model's features, each makes a part of the gradient of what it uses on them. Of a
parameter that is whole on every rank that part would be taken for the gradient, and the ranks would train apart
without a word. What a forward does with a parameter cannot be known from the outside; that the gradients differ can.
"""

from __future__ import annotations

import math
import weakref
import zlib
from contextlib import suppress
from datetime import timedelta
from functools import cache, cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namedmesh._torch import at_end_of_backward, backward_pass, communicates, default_store, tensors_in
from namedmesh.errors import GradientError, listing, ranks_in_words
from namedmesh.tensor_parallel.collectives import RankGroup, all_gather, local_shard
from namedmesh.tensor_parallel.gradient_sums import reduce_before_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

Sides: TypeAlias = tuple[str, nn.Module, bool, bool]
Key: TypeAlias = tuple[str, str]

# Up to which pass the ranks compare in each one, and from which what they have alike is settled though others have no gradient.
_EVERY_PASS, _LAST_PASS = 16, 1024

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
    plain tensor that is marked as a shard, with ``tensor_model_parallel``, is left out, and so is what only some ranks
    have.) The ranks send six numbers for each, at the end of one backward, and wait for each other up to the timeout of
    their group. Over a data axis, call it where that backward sums the gradients (not in DDP's ``no_sync``). Where the
    gradients come later, as in the two passes of zero-bubble schedules, or a compiled forward has no hooks, they compare
    before the optimizer's step, and the error comes from there. While a parameter has no gradient, or a zero one, they
    compare again, and what is frozen when it has one; parameters that begin to need a gradient have to do so on every rank.

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

    ``sides`` are modules by name, and whether the first input and the output of each are the same on every rank.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, sides: Iterable[Sides]) -> None:
        self.model, self.group, self.device = model, RankGroup(mesh), mesh.device_type
        self.ranks = dist.get_process_group_ranks(mesh.get_group())
        self.axis = (mesh.mesh_dim_names or ("the mesh",))[0]
        self.rows: dict[Key, list[float]] = {}
        self.dtypes: set[torch.dtype] = set()
        self.passes, self._pass, self._agreements, self.forwards = 0, -1, 0, 0
        self.noted: dict[str, int] = {}  # in which forward each input was
        self.largest = 0.0  # gradient of a parameter so far
        self.place = f"namedmesh/begun/{mesh.get_group().group_name}/{next(_numbers)}"
        # Those that needed no gradient on any rank when the ranks last compared.
        self.frozen: set[str] = set()
        # Of the inputs and outputs that are still to be compared.
        self.handles: dict[Key, RemovableHandle] = {}
        for name, module, whole_input, whole_output in sides:
            # Methods, and no closures, so that a copy of the model has a copy of this.
            if whole_input:
                note = partial(self._note_input, name)
                self.handles["input", name] = module.register_forward_pre_hook(note, with_kwargs=True)
            if whole_output:
                watch = partial(self._watch_output, name)
                self.handles["output", name] = module.register_forward_hook(watch)
        self.root_handle = model.register_forward_hook(self._after_forward)
        # Before an optimizer's step, too: where the gradients come after the backward, or without hooks.
        _watched[self] = None
        _watch_optimizers()

    @cached_property
    def names(self) -> list[str]:
        """The parameters that are still to be compared; found when first asked, after ``fully_shard``."""
        found = []
        for name, parameter in self.model.named_parameters():
            marks = (getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
            is_part = self._differs_along_axis(parameter) if isinstance(parameter, DTensor) else any(marks)
            if not is_part:
                found.append(name)
        return found

    def _parameters(self) -> dict[str, Tensor]:
        """Return those parameters as they are now: ``fully_shard`` has others in a forward than after a backward."""
        names = {*self.names}
        return {name: parameter for name, parameter in self.model.named_parameters() if name in names}

    # --- when -------------------------------------------------------------------------------------------------

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        _watched[self] = None  # a copy of the model has a copy of this, which is not registered
        self.forwards += 1
        found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not all(communicates(tensor, self.group.process_group) for tensor in found):
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

    def after_backward(self) -> None:
        """Compare what a pass has left, unless some of it never comes: then in fewer and fewer passes."""
        some = next(self.model.parameters(), None)
        if some is None or not communicates(some, self.group.process_group):
            return
        parameters = self._parameters()
        begun = {name for name in self.frozen if name in parameters and parameters[name].requires_grad}
        if begun:
            self._agree_on(begun)
            self.passes, self.frozen = 0, self.frozen - begun
        if self.passes == 0:
            self.names = self._on_every_rank(self.names)
        self.passes += 1
        if _compares(self.passes) and (self.handles or {*self.names} - self.frozen):  # the same on every rank
            self._compare(parameters)

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
        mine = {id(parameter) for parameter in self._parameters().values()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self.after_backward()

    # --- what -------------------------------------------------------------------------------------------------

    def _differs_along_axis(self, tensor: DTensor) -> bool:
        """Return whether the ranks of the axis have different parts of a DTensor, or of the sum that it is."""
        # Of its own mesh, which may cut the ranks otherwise, as those of experts do.
        layouts = enumerate(tensor.placements)
        dims = [dim for dim, layout in layouts if not isinstance(layout, Replicate)]
        return len(_ranks_along(tensor.device_mesh, dims) & {*self.ranks}) > 1

    def _across(self, parameters: Iterable[Tensor]) -> Iterable[dist.ProcessGroup]:
        """Return the groups over which parameters are sharded besides, as by FSDP2, whose ranks see other parts of them."""
        found: dict[frozenset[int], dist.ProcessGroup] = {}
        meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
        for mesh in dict.fromkeys(meshes):
            for dim in range(mesh.ndim):
                ranks = frozenset(_ranks_along(mesh, [dim]))
                if len(ranks) > 1 and ranks not in found and ranks != {*self.ranks}:
                    found[ranks] = mesh.get_group(dim)
        return found.values()

    def _note_input(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        value = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if value is not None and not isinstance(value, DTensor):
            # The last forward counts: a pipeline's first inputs are empty.
            if self.noted.get(name) != self.forwards:
                self.rows.pop(("input", name), None)
            self.noted[name] = self.forwards
            self._note(("input", name), value)

    def _watch_output(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or isinstance(output, DTensor):
            return
        if output.requires_grad:
            output.register_hook(partial(self._note, ("output", name)))

    def _note(self, key: Key, value: Tensor) -> None:
        """Note what this rank has of an activation, in all calls of its module in a forward or a backward together."""
        if communicates(value, self.group.process_group) and _compares(self.passes + 1):
            row = fingerprint(local_shard(value), self.dtypes)
            known = self.rows.get(key, _row(_ABSENT))
            self.rows[key] = [_PRESENT, *(map(sum, zip(row[1:-1], known[1:-1], strict=True))), row[-1]]

    def _row_of(self, parameter: Tensor | None) -> list[float]:
        if parameter is None or not parameter.requires_grad:
            return _row(_NEEDS_NONE)
        gradient = parameter.grad
        if gradient is None:
            return _row(_ABSENT)
        if isinstance(gradient, DTensor) and self._differs_along_axis(gradient):
            return _row(_PART)
        return fingerprint(local_shard(gradient), self.dtypes)

    def _on_every_rank(self, names: list[str]) -> list[str]:
        """Return the parameters that all ranks have: a bias may be on the first one only, and rows have to be as many."""
        marks = torch.tensor([1, -1], device=self.device) * zlib.crc32(repr(names).encode())
        dist.all_reduce(marks, dist.ReduceOp.MAX, self.group.process_group)
        lists = [names] * self.group.size
        if marks.sum():
            dist.all_gather_object(lists, names, self.group.process_group)
            names = sorted({*names}.intersection(*lists))
        return names

    def _compare(self, parameters: Mapping[str, Tensor]) -> None:
        """Let the ranks compare what they have, and forget what is settled.

        Raises:
            GradientError: they have different things.
        """
        keys = [("parameter", name) for name in self.names] + [*self.handles]
        rows = [self._row_of(parameters.get(name)) for name in self.names]
        rows += [self.rows.get(key, _row(_ABSENT)) for key in self.handles]
        # A pass that leaves no gradient anywhere may be one over numbers that mean nothing, as pipelines do to find shapes.
        gradients = [each.grad for each in self.model.parameters() if each.requires_grad]
        left = [local_shard(gradient) for gradient in gradients if gradient is not None]
        complete = len(left) == len(gradients) and _none_is_zero(left)
        rows.append([float(bool(left)), float(complete), *[0.0] * (_COLUMNS - 2)])
        mine = torch.tensor([rows], dtype=torch.float64, device=self.device)
        gathered = all_gather(mine, self.group, 0)
        self.rows.clear()
        if not gathered[:, -1, 0].any():
            return
        # What ranks use on their features, too, is alike while no gradient comes through these, as behind a layer of zeros.
        last = self.passes >= _LAST_PASS
        sizes = gathered[:, : len(self.names), 1].nan_to_num(0.0, 0.0, 0.0)
        self.largest = max([self.largest, *sizes.flatten().tolist()])
        found_out = _found_out(keys, gathered, self.largest, settles=last or bool(gathered[:, -1, 1].all()))
        for group in self._across(parameters.values()):
            dist.all_reduce(found_out, dist.ReduceOp.MAX, group)
        outcomes = dict(zip(keys, found_out.tolist(), strict=True))
        apart = {key: value - _SETTLED for key, value in outcomes.items() if value > _SETTLED}
        if apart:
            raise GradientError(*_problems(self.model, apart, f"the {self.group.size} ranks of {self.axis}"))
        self.frozen = {name for name in self.names if outcomes["parameter", name] == _FROZEN}
        self.names = [name for name in self.names if outcomes["parameter", name] != _SETTLED]
        for key in [*self.handles]:
            if last or outcomes[key] == _SETTLED:
                self.handles.pop(key).remove()
        if not self.names and not self.handles:
            self.root_handle.remove()
            _watched.pop(self, None)


def _ranks_along(mesh: DeviceMesh, dims: Sequence[int]) -> set[int]:
    """Return the ranks along some dims of a mesh, among them this one; from the mesh alone, whose groups may be gone."""
    place: list[Any] = [*(mesh.get_coordinate() or ())]
    for dim in dims:
        place[dim] = slice(None)
    return {*mesh.mesh[tuple(place)].flatten().tolist()}


# --- whether ranks have the same ------------------------------------------------------------------------------

# How many numbers a rank sends for each name: the state of the tensor, the fingerprint, and how it rounds.
_COLUMNS = 6
# The states: this rank has none, it has one, a part of a sum over the ranks, or a parameter that needs no gradient.
_ABSENT, _PRESENT, _PART, _NEEDS_NONE = 0.0, 1.0, 2.0, 3.0
# What the ranks find of a tensor that all of them have alike, and of a parameter that needs a gradient on none.
_SETTLED, _FROZEN = 1.0, -1.0

# How much of a rounding may be all of a tensor, by kind: the sum over all tokens that a parameter's gradient is cancels out.
_SHARES = {"parameter": 1.0, "input": 0.01, "output": 0.01}

_CHUNK = 1 << 20
_FREQUENCIES = (1.0, 0.7, 0.3)


def _compares(passes: int) -> bool:
    """Return whether the ranks compare in a pass: in each at first, then where their number is a power of two."""
    return passes <= _EVERY_PASS or passes & (passes - 1) == 0


def _none_is_zero(gradients: Iterable[Tensor]) -> bool:
    dense = (each.coalesce().values() if each.is_sparse else each for each in gradients)
    return all(bool(each.any()) for each in dense if each.numel())


def _row(state: float) -> list[float]:
    """Return the row of what has no numbers to compare."""
    return [state, *[0.0] * (_COLUMNS - 1)]


def fingerprint(value: Tensor, dtypes: set[torch.dtype]) -> list[float]:
    """Return the row of a plain tensor, computed in ``dtypes`` and its own: its size, and three weighted sums.

    Example:
        >>> row = fingerprint(torch.tensor([3.0, 4.0]), {torch.float32})
        >>> row[0], row[1]
        (1.0, 5.0)
    """
    value = value.detach()
    kinds = {kind for kind in (*dtypes, value.dtype) if kind.is_floating_point or kind.is_complex}
    eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    if value.is_sparse:
        value = value.coalesce().values()
    if value.is_complex():
        value = torch.view_as_real(value)
    flat = value.flatten()
    sums = torch.zeros(1 + len(_FREQUENCIES), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        place = torch.arange(start, start + part.numel(), dtype=torch.float64, device=flat.device)
        sums += torch.stack([part @ part, *(part @ (place * rate).cos() for rate in _FREQUENCIES)])
    squares, *weighted = sums.tolist()
    return [_PRESENT, math.sqrt(squares), *weighted, eps]


def _found_out(keys: Sequence[Key], rows: Tensor, largest: float, *, settles: bool) -> Tensor:
    """Return the verdict on each key, that there is a difference only unless this pass ``settles`` what there is none of."""
    found = rows.new_zeros(len(keys))
    for kind, share in _SHARES.items():
        places = [place for place, key in enumerate(keys) if key[0] == kind]
        if places:
            found[places] = _verdicts(rows[:, places], share, largest if kind == "parameter" else 0.0)
    return found if settles else found.where(found != _SETTLED, 0.0)


def _verdicts(rows: Tensor, share: float, largest: float) -> Tensor:
    """Return what the rows of all ranks, ``(ranks, tensors, numbers)``, say: 0 where nothing is settled, or else a verdict.

    Two tensors count as different where a number of theirs is apart by more than the square root of what their type
    rounds off: sums in another order come near to none of that. The verdict is then ``_SETTLED`` and how far they are
    apart, as a part of the size. Where all of it is within a ``share`` of the rounding of the largest tensor, nothing is
    settled: it may be zero. So it may, at a smaller part, beside the ``largest`` one of those that were settled before.
    """
    has, numbers, eps = rows[..., 0], rows[..., 1:-1], rows[..., -1].amax(0)
    sizes = numbers[..., 0]
    # Where a gradient is zero but for rounding, the terms that cancel out in it may be much larger than eps says; but a
    # type of 16 bits rounds so coarsely that small gradients would hide behind the largest.
    nothing = share * (1000 * eps).clamp(max=1e-4) * sizes.nan_to_num(0.0, 0.0, 0.0).max()
    nothing = nothing.maximum((1000 * eps).clamp(max=1e-6) * largest)
    difference = (numbers.amax(0) - numbers.amin(0)).amax(-1)
    part = difference / sizes.amax(0)
    found = has.all(0) * _SETTLED
    found = torch.where((part > eps.sqrt()) & (difference > nothing), _SETTLED + part, found)
    says_something = torch.isfinite(rows).all(-1).all(0) & (sizes.amax(0) > nothing)
    found = torch.where(says_something, found, 0.0)
    found = torch.where((has == _NEEDS_NONE).all(0), _FROZEN, found)
    return torch.where((has == _PART).all(0), _SETTLED, found)


# --- what they say where they do not --------------------------------------------------------------------------

_SENTENCES = {
    "input": (
        "the input of {names}: the plan says that {ranks} have the same, but they differ, {far}; give every rank the "
        "same batch, the same values of what is whole and the same random numbers (namedmesh.training.streams), or "
        "say with input_layouts how the input is sharded"
    ),
    "output": (
        "the output of {names}: {ranks} have all of it, but their gradients of it differ, {far}: each uses it with its "
        "own part of something; leave a column layer's output sharded, with output_layouts=Shard(-1) (keys and values: "
        "KeyValueParallel()), and use the output of a row layer only where all ranks compute the same"
    ),
    "parameter": (
        "{names}: whole on each of {ranks}, but their gradients differ, {far}: each has a part, and they would train "
        "apart; where the ranks use a module on their own features or tokens only, add {entries} to the plan, which sums "
        "the parts (what all use alike elsewhere, too, needs parameters of its own there); where they use their own "
        "features of what a linear makes, give it a style: ColwiseParallel(), KeyValueParallel() for keys and values, "
        "SumTailGradient(width) if all use its last width features; what all ranks use alike stays whole (KeepWhole()), "
        "and can differ because of what follows it only"
    ),
}


def _problems(model: nn.Module, apart: Mapping[Key, float], ranks: str) -> list[str]:
    """Return a sentence for each kind of thing of which ranks are apart, by so much of the size."""
    problems = []
    # The bias of a row layer differs because of its output.
    told = {("parameter", f"{name}.bias".lstrip(".")) for kind, name in apart if kind == "output"}
    for kind, sentence in _SENTENCES.items():
        found = {key[1]: part for key, part in apart.items() if key[0] == kind and key not in told}
        if not found:
            continue
        names = listing(name or "the model" for name in found)
        far = f"by up to {max(found.values()):.2g} of the size"
        entries = listing(_entries(model, found)) if kind == "parameter" else ""
        problems.append(sentence.format(names=names, far=far, ranks=ranks, entries=entries))
    return problems


def _entries(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the entries of a plan that sum the gradients of some parameters, one for each module."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owner, _, own_name = name.rpartition(".")
        owners.setdefault(owner, []).append(own_name)
    entries = []
    for owner, own_names in owners.items():
        placements = ""
        if len([*model.get_submodule(owner).parameters(recurse=False)]) != len(own_names):
            placements = "{" + ", ".join(f"{name!r}: Replicate()" for name in own_names) + "}"
        entries.append(f"{owner!r}: LocalParameters({placements})")
    return entries
