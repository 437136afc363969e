"""The values that a rank saves and loads, under the names of :mod:`checkpoint_names`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from namedmesh._errors import CheckpointError, format_items
from namedmesh._sharding import (
    find_attribute_axes,
    find_plain_shard,
    has_partition_dim,
    is_expert,
    is_tp_shard,
    to_local,
)
from namedmesh._torch.modules import has_unsharded_gradients, runs_code_on_load
from namedmesh._torch.tensors import replace_local_tensor
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.training import seeds
from namedmesh.training.checkpoint_names import (
    GRADIENT,
    GROUPS,
    Names,
    check_storable,
    format_entry,
    has_used_gradients,
    note_load,
    to_plain_data,
)
from namedmesh.training.tying import get_tie

Model: TypeAlias = nn.Module | Sequence[nn.Module]
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None

_RANDOM = "namedmesh.random."


class State:
    """The model, optimizers, data loaders and RNG states of this rank, by name.

    Args:
        mesh: the mesh; None in a process without process groups.
        model: the model, or a list.
        optimizers: the optimizer, or a list.
        data: the data loader, or a list.

    Attributes:
        values: by entry name, the tensors of the model and the optimizers (shards as DTensors over
            the same memory), and copies of all other objects.
        owners: the parameter and the key of each entry that belongs to an optimizer's parameter.
        params: the parameters by name, shards as DTensors.
        names: the names of this rank, and the options of its optimizers.
        plain_shards: the names of parameters that are plain tensors, and DTensors in ``params``,
            because their attributes make them shards.
        plain_experts: the names of parameters that are plain tensors, and belong to an expert by
            their attributes.
    """

    def __init__(
        self, mesh: NamedMesh | None, model: Model, optimizers: Optimizers = None, data: object = None
    ) -> None:
        self.mesh = mesh
        self.modules: list[nn.Module] = list(model) if isinstance(model, Sequence) else [model]
        given: Any = () if optimizers is None else optimizers
        self.optimizers: list[Optimizer] = list(given) if isinstance(given, Sequence) else [given]
        loaders: Any = data if isinstance(data, list | tuple) else [data]
        self.loaders: list[Any] = [loader for loader in loaders if loader is not None]
        self.values: dict[str, Any] = {}
        self.owners: dict[str, tuple[str, str]] = {}
        self.params: dict[str, Tensor] = {}
        self.names: Names = Names.merge([])
        self.plain_shards: set[str] = set()
        self.plain_experts: set[str] = set()
        # The name of each parameter, by its id: a parameter may have several names.
        self._names_by_id: dict[int, str] = {}
        # For each entry of the model, the tensor that it was made from.
        self._sources: dict[str, object] = {}
        # Modules whose tensors cannot be loaded in place, with the entry of each key.
        self._indirect: list[tuple[nn.Module, dict[str, str]]] = []

    def collect(self) -> Names:
        """Fill the attributes from this rank's model, optimizers, data loaders and generators.

        Does not communicate.

        Returns:
            The names of this rank.

        Raises:
            CheckpointError: a model or an optimizer is something else, such as its state dict; a
                parameter is on the meta device; a tensor cannot be saved; two values
                have the same name; an optimizer has parameters that are not in the model; a value
                is not plain data; or gradients are not reduced yet.
        """
        problems = []
        for kind, values in ((nn.Module, self.modules), (Optimizer, self.optimizers)):
            for value in values:
                if not isinstance(value, kind):
                    got = type(value).__name__
                    problem = f"expected a torch {kind.__name__}, or a list of them, got {got}"
                    problems.append(problem)
        if problems:
            raise CheckpointError(*problems)
        for module in self.modules:
            self._add_module(module)
        for number, optimizer in enumerate(self.optimizers):
            self._add_optimizer(number, optimizer)
        for number, loader in enumerate(self.loaders):
            if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
                raise CheckpointError(
                    "data must have state_dict() and load_state_dict(), got "
                    f"{type(loader).__name__}; pass torchdata's StatefulDataLoader, or save the "
                    "number of the step, and call set_epoch and skip the batches before it when "
                    "the run resumes"
                )
            self._add(f"namedmesh.data.{number}", loader.state_dict())
        for name, state in seeds.collect_rng_states().items():
            self._add(f"{_RANDOM}{name}", state)
        return self.names

    def _add_module(self, module: nn.Module) -> None:
        """Add the state dict of a module, and the names of its parameters."""
        remove_wrappers = _make_wrapper_remover(module)
        registered = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
        in_place = not runs_code_on_load(module)
        entries: dict[str, str] = {}
        on_meta = []
        # keep_vars keeps the parameters themselves, whose attributes and ids are needed.
        for key, value in module.state_dict(keep_vars=True).items():
            name = remove_wrappers(key)
            if isinstance(value, Tensor) and value.is_meta:
                on_meta.append(key)
            entries[key] = f"model.{name}"
            in_place = in_place and (value is None or id(value) in registered)
            self._add_to_model(name, value)
        if on_meta:
            names = format_items(on_meta, 4)
            problem = f"{names}: on the meta device; call model.to_empty(device=...) first"
            raise CheckpointError(seeds.format_meta_problem(module) or problem)
        if not in_place:
            self._indirect.append((module, entries))
        # A state-dict hook may save a parameter under other names, such as a fused one in parts.
        for key, param in module.named_parameters():
            if id(param) not in self._names_by_id:
                self._add_parameter(remove_wrappers(key), param)

    def _add_to_model(self, name: str, value: Any) -> None:
        """Add an item of the model's state dict; a parameter seen before becomes an alias."""
        entry = f"model.{name}"
        if value is None or self._sources.get(entry) is value:
            return  # two modules of this rank may share the parameter
        if isinstance(value, nn.Parameter):
            first = self._names_by_id.get(id(value), name)
            if first != name:
                self.names.aliases[name] = first
                return
            if (tie := get_tie(value)) is not None:
                self.names.ties[tie] = name
            self._add_parameter(name, value)
        self._add(entry, value, value)
        self._sources[entry] = value
        self.names.model[name] = None

    def _add_parameter(self, name: str, param: Tensor) -> None:
        """Add the name of a parameter."""
        self._names_by_id[id(param)] = name
        self.params[name] = wrapped = self._wrap_plain_shard(param, param)
        if isinstance(param, DTensor):
            return
        if is_expert(param):
            self.plain_experts.add(name)
        if isinstance(wrapped, DTensor):
            self.plain_shards.add(name)
        elif is_tp_shard(param) and not has_partition_dim(param):
            axis = find_attribute_axes(param)[-1]
            if self.mesh is not None and axis in self.mesh and self.mesh.size(axis) > 1:
                raise CheckpointError(
                    f"{name!r}: a local shard over {axis!r}, and its attributes do not say of which "
                    "dim; set tensor_model_parallel and partition_dim, or make it a DTensor"
                )

    def _add(self, name: str, value: Any, param: object = None) -> None:
        """Add a tensor or another object to ``values``, under the name of an entry.

        Args:
            name: the name of the entry.
            value: the tensor or object; None adds nothing.
            param: the parameter whose attributes describe how the tensor is sharded.
        """
        if value is None:
            return
        label = format_entry(name, self.owners)
        if not isinstance(value, Tensor):
            value = to_plain_data(value, label)
        else:
            check_storable(value, label)
            if isinstance(param, Tensor):
                value = self._wrap_plain_shard(value, param)
        if name in self.values:
            remedy = "give a parameter to one optimizer"
            if name.startswith("model."):
                remedy = (
                    "save two models as one, nn.ModuleDict({'generator': ..., 'critic': ...}), "
                    "and number the layers of pipeline stages with training.stage_layers"
                )
            raise CheckpointError(f"{label} is the name of two values; {remedy}")
        self.values[name] = value

    def _add_optimizer(self, number: int, optimizer: Optimizer) -> None:
        """Add the state of an optimizer, and the options and gradients of its parameters.

        Args:
            number: the position of the optimizer in ``optimizers``.
            optimizer: the optimizer.
        """
        named = self._named_parameters(optimizer)
        if unknown := [tuple(param.shape) for name, param in named if not name]:
            raise CheckpointError(
                f"the optimizer has parameters of shape {format_items(unknown)} that are not in the "
                "model; create it from the current parameters of the model, after parallelize() and "
                "fully_shard()"
            )
        state_dict = optimizer.state_dict()
        own = {key: value for key, value in state_dict.items() if key not in {"state", "param_groups"}}
        for index, values in state_dict["state"].items():
            if not isinstance(index, int):  # torch numbers the parameters and keeps all other keys
                own.setdefault("state", {})[index] = values
                continue
            name, param = named[index]
            # The state of an optimizer is sharded as the parameter that it belongs to.
            for key, value in values.items():
                self._add_of_parameter(f"optimizer.state.{name}.{key}", (name, key), value, param)
        is_used = has_used_gradients(optimizer)
        for name, param in named:
            grad = param.grad
            if grad is not None and not is_used:
                dense = grad.to_dense() if grad.is_sparse else grad
                self._add_of_parameter(f"{GRADIENT}{name}", (name, "gradient"), dense, param)
        if own:
            self._add(f"namedmesh.optimizers.{number}", own)
        self._add_options(number, optimizer)

    def _add_of_parameter(self, entry: str, owner: tuple[str, str], value: Any, param: Tensor) -> None:
        """Add a value that an optimizer keeps for a parameter."""
        if self.owners.setdefault(entry, owner) != owner:
            raise CheckpointError(f"{entry!r} is the state of two parameters; rename one of them")
        self._add(entry, value, param)
        found = self.values.get(entry)
        is_local = isinstance(found, Tensor) and found.ndim > 0 and not isinstance(found, DTensor)
        if is_local and isinstance(self.params[owner[0]], DTensor):
            self.names.local[entry] = None

    def _add_options(self, number: int, optimizer: Optimizer) -> None:
        """Add the options of an optimizer, for each of its parameters and groups."""
        # A checkpoint may be loaded into a base class of its optimizer, or into a subclass.
        bases = type(optimizer).__mro__
        class_names = [base.__name__ for base in bases[: bases.index(Optimizer)]]
        for position, group in enumerate(optimizer.param_groups):
            given = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            options = to_plain_data(given, "an option of the optimizer")
            self.names.groups[number * GROUPS + position] = (class_names, options)
            for param in group["params"]:
                self.names.params[self._names_by_id[id(param)]] = number * GROUPS + position

    def _named_parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """Return the parameters of an optimizer with their names in the model.

        The order is the numbering of ``optimizer.state_dict()``. The name is empty if the parameter
        is not in the model.
        """
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return [(self._names_by_id.get(id(param), ""), param) for param in params]

    def _wrap_plain_shard(self, tensor: Tensor, param: Tensor) -> Tensor:
        """Wrap a plain shard in a DTensor over the same memory. Return other tensors detached.

        Does not communicate.

        Args:
            tensor: the parameter, or a tensor that an optimizer keeps for it.
            param: the parameter, whose attributes say how it is sharded.
        """
        if isinstance(tensor, DTensor):
            return tensor  # to detach one takes as long as to copy it
        tensor = tensor.detach()
        shard = find_plain_shard(param, self.mesh)
        if shard is None or tensor.shape != param.shape:
            return tensor
        if shard.num_blocks > 1:
            raise CheckpointError(
                f"a shard of {shard.num_blocks} fused blocks (partition_stride); make each block a parameter"
            )
        return DTensor.from_local(tensor, shard.mesh, [Shard(shard.dim)], run_check=False)

    def check_gradients(self) -> None:
        """Check that FSDP2 holds no gradients that are not reduced yet, which cannot be saved.

        Raises:
            CheckpointError: it does.
        """
        if self.optimizers and any(map(has_unsharded_gradients, self.modules)):
            raise CheckpointError(
                "gradients are accumulated on each rank, and not reduced yet "
                "(set_requires_gradient_sync(False)); save after the optimizer's step"
            )

    @torch.no_grad()
    def all_reduce_partial(self) -> None:
        """All-reduce the partial DTensors in ``values``, because DCP rejects them.

        An optimizer may keep a partial norm, for example. Collective: every rank must call it,
        after :meth:`collect` has succeeded on all ranks.
        """
        for name, value in self.values.items():
            if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
                reduced = [Replicate() if place.is_partial() else place for place in value.placements]
                self.values[name] = value.redistribute(placements=reduced)

    @torch.no_grad()
    def copy_to_cpu(self, pinned: dict[str, Tensor]) -> None:
        """Replace the tensors in ``values`` by copies on the CPU, for a save in the background.

        Copies from an accelerator go to pinned memory and do not wait for each other. To allocate
        pinned memory is slow, so the memory of the previous save is used again.

        Args:
            pinned: the pinned memory by entry, which is overwritten: the previous save must have
                finished.
        """
        devices: set[torch.device] = set()
        for name, value in self.values.items():
            if not isinstance(value, Tensor):
                continue
            local = to_local(value)
            copy = torch.empty_like(local, device="cpu") if local.is_cpu else pinned.get(name)
            if copy is None or (copy.shape, copy.dtype) != (local.shape, local.dtype):
                copy = pinned[name] = torch.empty_like(local, device="cpu", pin_memory=True)
            copy.copy_(local, non_blocking=True)
            self.values[name] = replace_local_tensor(value, copy) if isinstance(value, DTensor) else copy
            devices.add(local.device)
        for device in devices - {torch.device("cpu")}:
            torch.accelerator.current_stream(device).synchronize()

    def apply(
        self,
        loaded: Mapping[str, Any],
        owners: Mapping[str, tuple[str, str]],
        params: Container[str],
        options: Mapping[int, dict[str, Any]],
    ) -> None:
        """Give loaded objects, and tensors that are not in place, to their owners.

        Does not communicate.

        Args:
            loaded: the tensors and objects, by entry name.
            owners: the parameter and the key of the entries of optimizers.
            params: the parameters whose optimizer state is loaded. The others keep theirs.
            options: the saved options of the groups here.
        """
        for module, entries in self._indirect:
            state_dict: dict[str, Any] = {}
            for key, entry in entries.items():
                if entry in loaded:
                    name = entry.removeprefix("model.")
                    state_dict[key] = self._to_plain_shard(name, loaded[entry])
            # strict=False, because load() has checked the names of all ranks.
            if state_dict:
                module.load_state_dict(state_dict, strict=False)
        by_param: dict[str, dict[str, Any]] = {}
        for entry, (name, key) in owners.items():
            if entry in loaded:
                by_param.setdefault(name, {})[key] = self._to_plain_shard(name, loaded[entry])
        for number, optimizer in enumerate(self.optimizers):
            own = dict(loaded.get(f"namedmesh.optimizers.{number}", {}))
            for position, group in enumerate(optimizer.param_groups):
                group.update(options.get(number * GROUPS + position, {}))
            self._apply_to_optimizer(optimizer, by_param, own, params)
        for number, loader in enumerate(self.loaders):
            loader.load_state_dict(loaded[f"namedmesh.data.{number}"])
        names = {name.removeprefix(_RANDOM): name for name in loaded if name.startswith(_RANDOM)}
        seeds.restore_rng_states({name: loaded[entry] for name, entry in names.items()})

    def _to_plain_shard(self, param_name: str, value: Any) -> Any:
        """Return the local tensor for a parameter that is a plain shard, else the value."""
        return value.to_local() if param_name in self.plain_shards and isinstance(value, DTensor) else value

    def _apply_to_optimizer(
        self,
        optimizer: Optimizer,
        loaded: Mapping[str, dict[str, Any]],
        own: dict[str, Any],
        params: Container[str],
    ) -> None:
        """Call ``load_state_dict()`` of an optimizer, and set the gradients of its parameters.

        Args:
            optimizer: the optimizer.
            loaded: by parameter, its state by key.
            own: the state that belongs to no parameter.
            params: the parameters whose state is loaded.
        """
        named = self._named_parameters(optimizer)
        state_dict = optimizer.state_dict()
        state = dict(own.pop("state", {}))
        for index, (name, param) in enumerate(named):
            if name not in params:
                state[index] = state_dict["state"].get(index, {})
                continue
            state[index] = dict(loaded.get(name, {}))
            grad = state[index].pop("gradient", None)
            if grad is not None:
                param.grad = grad.to(param.dtype)
        state = {index: values for index, values in state.items() if values}
        optimizer.load_state_dict({**state_dict, **own, "state": state})
        # torch converts all state except "step" to the dtype of the parameter. Restore the dtype.
        for index, (_, param) in enumerate(named):
            for key, value in state.get(index, {}).items():
                converted = optimizer.state[param][key]
                if isinstance(value, Tensor) and converted.dtype != value.dtype:
                    optimizer.state[param][key] = value.to(converted.device)
        note_load(optimizer)


def _make_wrapper_remover(module: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of DDP and other wrappers from a key."""
    wrapped = []  # the names of the modules that are DDP's
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, DistributedDataParallel):
            wrapped.append(f"{name}." if name else "")

    def remove_wrappers(key: str) -> str:
        for prefix in reversed(wrapped):  # inner ones first: their names contain the outer ones
            if key.startswith(f"{prefix}module."):
                key = prefix + key.removeprefix(f"{prefix}module.")
        return seeds.strip_wrapper_names(key)

    return remove_wrappers
