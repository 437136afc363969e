"""Comparison of gradients and inputs of parallelized models, before an optimizer's step.

A plan does not show how a forward uses the parameters that it leaves out, or the activations that
count as replicated. The gradients show it. Layers only keep references to tensors that exist
anyway; everything is computed before the step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._checks.fingerprints import (
    LENIENT,
    Comparison,
    Differences,
    Entry,
    Problem,
    find_tolerance,
    fingerprint,
    is_comparable,
    is_due,
    raise_differences,
)
from namedmesh._errors import GradientError, format_items, format_ranks
from namedmesh._sharding import group_by_layout, is_replicated, to_local
from namedmesh._torch.execution import disable_dispatch_modes, is_capturing
from namedmesh._torch.groups import all_gather_object, get_group_by_name
from namedmesh._torch.tensors import is_async

NUM_PRIORITIES = 3
"""The priorities of inputs, gathered outputs and gradients: each explains the next."""

# The gradients that are kept until the step use at most this much memory.
_KEPT_BYTES = 1 << 26
# Two ranks have the same tokens if their fingerprints differ by less than this, relative to the
# norm: half precision may round them differently.
_SAME_TOKENS = 5e-3

# All checks of this process, in the order in which they were made, as on every rank.
_checks: weakref.WeakKeyDictionary[ModelCheck, None] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


class KeptTensors:
    """References to tensors of the last forward and backward of a model.

    They are compared before the next step.

    Keeping a reference runs no operator and does not communicate, so that neither autograd nor a
    dispatch mode sees a difference. Copies and pickles contain no tensors.

    Args:
        group_name: the name of the group whose ranks compare the shape of the first input; None to
            compare none.
        axis: the name of its axis.
    """

    def __init__(self, group_name: str | None, axis: str) -> None:
        self.group_name = group_name
        self.axis = axis
        self.steps_left = 2
        # The dtypes in which the layers have computed.
        self.dtypes: set[torch.dtype] = set()
        self.has_run = False
        self.input: tuple[str, Tensor] | None = None
        self.gradients: dict[str, Tensor] = {}

    def release(self) -> None:
        """Release the tensors. It ends a step, unless ``clip_grad_norm_`` has ended it already."""
        self.steps_left -= self.has_run
        vars(self).update(has_run=False, input=None, gradients={})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle."""
        return {**vars(self), "steps_left": 2, "has_run": False, "input": None, "gradients": {}}

    def keep_input(self, name: str, x: Tensor, *, is_replicated: bool = True) -> None:
        """Keep the input of the layer that runs first in a forward; the last forward counts.

        Do not call it in compiled code.

        Args:
            name: the name of the layer.
            x: the input.
            is_replicated: whether the ranks must have the same input. Otherwise only its dtype is
                noted.

        Raises:
            GradientError: in the first forward, on every rank: the inputs have different shapes.
        """
        is_plain = type(x) is Tensor or isinstance(x, DTensor) or is_async(x)
        if not self.steps_left or not is_plain or x.is_meta or is_capturing():
            return
        self.has_run = True
        # Ranks with other shards have other values, as they should.
        is_shard = isinstance(x, DTensor) and {*x.placements} != {Replicate()}
        is_kept = is_replicated and not is_shard and (self.input is None or self.input[0] == name)
        if is_kept and self.group_name is not None:
            group_name, self.group_name = self.group_name, None
            _compare_shapes(group_name, self.axis, name, x)
        if not torch.is_grad_enabled():
            return
        if x.is_floating_point():
            self.dtypes.add(x.dtype)
        if torch.is_autocast_enabled(x.device.type):
            self.dtypes.add(torch.get_autocast_dtype(x.device.type))
        if is_kept:
            self.input = name, x

    def keep_gradient(self, name: str, grad: Tensor) -> None:
        """Keep the gradient of the all-gathered output of a layer.

        Args:
            name: the name of the layer.
            grad: the gradient.
        """
        kept_bytes = sum(kept.nbytes for kept in self.gradients.values())
        is_small = kept_bytes + grad.nbytes <= _KEPT_BYTES
        if self.steps_left and is_small and not is_capturing():
            self.gradients.setdefault(name, grad)


@disable_dispatch_modes
def _compare_shapes(group_name: str, axis: str, name: str, x: Tensor) -> None:
    """Compare the shapes of an input between ranks: unequal ones end the process, or hang.

    Collective: every rank of the group must call it.

    Raises:
        GradientError: on every rank: the shapes differ.
    """
    shapes_by_rank = all_gather_object(get_group_by_name(group_name), tuple(x.shape))
    shapes = dict.fromkeys(shapes_by_rank)
    if len(shapes) > 1:
        detail = f" (shapes {format_items(shapes)})"
        raise GradientError(_format_different_inputs(name, len(shapes_by_rank), axis, detail))


class ModelCheck:
    """The check of a model over the ranks of one axis.

    It is an attribute of the model, and is copied and pickled with it.

    Args:
        model: the model.
        mesh: the mesh with one axis.
        token_groups: the names of groups whose ranks share experts, and must have different tokens.
            Their gradients differ, so nothing else is compared.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, token_groups: Sequence[str] = ()) -> None:
        self.group_name = mesh.get_group().group_name
        self.device = torch.device(mesh.device_type)
        self.axis = (mesh.mesh_dim_names or ("the mesh",))[0]
        self.ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))
        self.has_own_tokens = bool(token_groups)
        self.token_groups = list(token_groups)
        self.kept = KeptTensors(None if token_groups else self.group_name, self.axis)
        self.model: weakref.ref[nn.Module]
        vars(model).setdefault("replica_checks", []).append(self)
        self.__setstate__({"model": model})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle; the model among them is copied, too."""
        return {**vars(self), "model": self.model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set attributes, and add the check, or a copy of it, to the checks of the process."""
        # The check is in the model, and must not keep it alive.
        vars(self).update(state, model=weakref.ref(state["model"]))
        _checks[self] = None

    def compare(self, params: Mapping[str, Tensor]) -> Comparison:
        """Return the comparison of the tensors that must be equal along the axis.

        Args:
            params: the parameters that are stepped, by name.
        """
        group = get_group_by_name(self.group_name)
        entries: list[Entry] = []
        if self.has_own_tokens:
            return Comparison(entries, group, self.device, self._describe)
        if self.kept.input is not None:
            name, x = self.kept.input
            # Layers before this one may round differently on each rank. Ids must be equal.
            tolerance = LENIENT if x.is_floating_point() else find_tolerance(x.dtype)
            entries.append(Entry("input", name, x, to_local(x).numel(), tolerance))
        for name, gathered in self.kept.gradients.items():
            tolerance = find_tolerance(gathered.dtype, *self.kept.dtypes)
            entries.append(Entry("gathered", name, gathered, gathered.numel(), tolerance))
        for names in group_by_layout(params).values():
            if not is_replicated(params[names[0]], self.ranks):
                continue
            for name in names:
                param, grad = params[name], params[name].grad
                is_partial = isinstance(grad, DTensor) and grad.placements != getattr(
                    param, "placements", None
                )
                if not is_partial:
                    tolerance = find_tolerance(param.dtype, *self.kept.dtypes)
                    entries.append(Entry("gradients", name, grad, to_local(param).numel(), tolerance))
        comparable = [entry for entry in entries if is_comparable(entry.tensor)]
        return Comparison(comparable, group, self.device, self._describe)

    def _describe(self, differences: Differences) -> list[Problem]:
        """Return the problems of entries that differ."""
        names: dict[str, dict[str, float]] = {"input": {}, "gathered": {}, "gradients": {}}
        for (kind, name), difference in differences.items():
            names[kind][name] = difference
        size = len(self.ranks)
        ranks = f"the {size} ranks of {self.axis}"
        problems = []
        if names["input"]:
            name = min(names["input"])
            problems.append((0, _format_different_inputs(name, size, self.axis)))
        if names["gathered"]:
            message = (
                f"{format_items(sorted(names['gathered']))}: the output is all-gathered over "
                f"{ranks} and counts as replicated, but its gradients differ: each rank uses a "
                "part of it, and loses the gradients of the others. Let the layer return its "
                "local shard (ColwiseParallel() without output_layouts), or use "
                "KeyValueParallel(...) for keys and values of which each rank uses its own heads"
            )
            problems.append((1, message))
        if names["gradients"]:
            message = (
                f"{format_items(names['gradients'])}: replicated on {ranks}, but the gradients "
                f"differ, by up to {max(names['gradients'].values()):.2g} of their norm. Each "
                "rank has a partial gradient, and the replicas would diverge. Give a module that "
                "works on a local shard of features or tokens LocalParameters(), which "
                "all-reduces its gradients, and a linear whose features it uses shard by shard "
                "ColwiseParallel(), or KeyValueParallel(...) for keys and values"
            )
            problems.append((2, message))
        return problems

    def find_equal_tokens(self) -> list[Problem]:
        """Return a problem for ranks that share experts and have the same tokens.

        Tokens that are all equal or not finite show nothing; tokens of a later step are compared.

        Collective: every rank of the groups must call it.
        """
        numbers: list[float] = []
        if self.token_groups and self.kept.input is not None and is_comparable(self.kept.input[1]):
            tokens = self.kept.input[1]
            if len(tokens) and bool((tokens != tokens[0]).any() and tokens.isfinite().all()):
                numbers = fingerprint([tokens], tokens.numel())[0, :64].flatten().tolist()
        problems = []
        for group_name in [*self.token_groups]:
            numbers_by_rank = all_gather_object(get_group_by_name(group_name), numbers)
            if all(numbers_by_rank):
                self.token_groups.remove(group_name)
            for first in filter(None, numbers_by_rank):
                same = [rank for rank, other in enumerate(numbers_by_rank) if _are_close(first, other)]
                if len(same) > 1:
                    message = (
                        f"{format_ranks(same)} of the {len(numbers_by_rank)} ranks that share experts "
                        f"send the same tokens, whose gradients would count {len(same)} times; shard "
                        "the sequence (SequenceParallel), or shard the experts over etp "
                        "(ExpertTensorParallel)"
                    )
                    problems.append((0, message))
        return problems


def _are_close(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two ranks with these fingerprints have the same tokens."""
    is_same_size = len(first) == len(second)
    return is_same_size and math.dist(first, second) <= _SAME_TOKENS * math.hypot(*first)


def _format_different_inputs(name: str, size: int, axis: str, detail: str = "") -> str:
    """Return the message about the different inputs of a layer."""
    return (
        f"{name or 'the model'}: the {size} ranks of {axis} have different inputs{detail}, but "
        "must work on the same samples; give their samplers the rank on the data axes "
        "(training.sampler_kwargs(mesh)), and the same seed to dropout before this layer"
    )


def list_computing_dtypes() -> set[torch.dtype]:
    """Return the dtypes in which the layers of all checked models have computed."""
    dtypes: set[torch.dtype] = set()
    for check, _ in list_checks():
        dtypes |= check.kept.dtypes
    return dtypes


def list_checks() -> list[tuple[ModelCheck, nn.Module]]:
    """Return the checks of this process, and their models, which may be deleted at any time."""
    checks = []
    for check in list(_checks):
        model = check.model()
        if model is not None:
            checks.append((check, model))
    return checks


def compare_before_step(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    """Compare the models of an optimizer's parameters, before a step that is due.

    Collective: every rank that steps the optimizer must call it.

    Args:
        optimizer: the optimizer.
        params: its parameters.

    Raises:
        GradientError: on every rank: values that must be equal differ.
    """
    # Neither compiled code nor a CUDA graph can contain a read of values by the host.
    if torch.compiler.is_compiling() or is_capturing():
        return
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if is_due(step):
        compare_models({id(param) for param in params})


@disable_dispatch_modes
@torch.no_grad()
def compare_models(ids: set[int], comparisons: Sequence[Comparison] = ()) -> None:
    """Compare the models that have some of these parameters, over the axes of their checks.

    Collective: every rank with these parameters must call it.

    Args:
        ids: the ids of the parameters.
        comparisons: further comparisons.

    Raises:
        GradientError: on every rank: values that must be equal differ.
    """
    compared = list(comparisons)
    raising_groups: list[dist.ProcessGroup] = []
    problems: list[Problem] = []
    for check, model in list_checks():
        # Look the parameters up again: fully_shard may have replaced them since.
        params = {name: param for name, param in model.named_parameters() if id(param) in ids}
        if not params:
            continue
        compared.append(check.compare(params))
        problems += check.find_equal_tokens()
        check.kept.release()
        # Under FSDP2 the ranks of another shard of a parameter must raise the error, too.
        for mesh in {param.device_mesh: None for param in params.values() if isinstance(param, DTensor)}:
            raising_groups.extend(mesh.get_all_groups())
    if compared:
        raise_differences(compared, raising_groups, problems)
