"""The values that a rank saves and loads, under names that do not depend on the layout.

The names of entries are

- ``model.NAME``: a parameter, a buffer or an extra state;
- ``optimizer.PARAMETER:KEY``: the state of an optimizer for one parameter, see
  :func:`make_entry_name`;
- ``optimizers.NUMBER``: the state of an optimizer that belongs to no parameter;
- ``data.NUMBER``: the state of a data loader;
- ``random.NAME``: the state of a random generator.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from namedmesh._torch import replace_local_tensor
from namedmesh.errors import CheckpointError, format_items, get_first_line
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import find_plain_shard, to_local
from namedmesh.training import seeds
from namedmesh.training.tying import get_tie

Model: TypeAlias = nn.Module | Sequence[nn.Module]
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None

Options = dict[str, tuple[list[str], dict[str, Any], int, list[dict[str, Any]]]]
"""How each parameter is optimized.

The classes of its optimizer, the options and the number of its group, and the options of all groups
of the optimizer, including groups without parameters.
"""

GROUPS = 10**6
"""A parameter group has the number ``GROUPS * optimizer + position``."""

Names: TypeAlias = tuple[dict[str, str], dict[tuple[str, str], str]]
"""Two dicts with parameter names of one rank.

The first maps every further name (alias) of a shared parameter to the name that it is saved under.
The second maps the tie of ``tie_stages()``, and the end that this rank has, to the name of the
parameter.
"""


class State:
    """The model, optimizers, data loaders and RNG states of this rank, by name.

    Args:
        mesh: the mesh; None in a process without process groups.
        model: the model, or a list.
        optimizers: the optimizer, or a list.
        data: the data loader, or a list.

    Attributes:
        extra: the keyword arguments ``**extra`` of ``save()``.
        values: by entry name, the tensors (shards as DTensors), and copies of all other objects.
        parameters: the entry names of the model's parameters, whose replicas must be equal.
        aliases: the further names of parameters, as in ``Names``.
        ties: the names of tied parameters, as in ``Names``.
        options: the options of optimized parameters.
        local: the entry names of optimizer tensors that are plain tensors (and therefore differ by
            rank) although their parameter is a DTensor.
    """

    def __init__(
        self, mesh: NamedMesh | None, model: Model, optimizers: Optimizers = None, data: object = None
    ) -> None:
        self.mesh = mesh
        self.modules = [model] if isinstance(model, nn.Module) else list(model)
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
        loaders: Any = data if isinstance(data, list | tuple) else [data]
        self.loaders = [loader for loader in loaders if loader is not None]
        self.extra: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.parameters: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.ties: dict[tuple[str, str], str] = {}
        self.options: Options = {}
        self.local: set[str] = set()
        # The name of each parameter, by its id: a parameter may have several names.
        self._names: dict[int, str] = {}
        # For each entry, the tensor of the model or the optimizer that it was made from.
        self._sources: dict[str, Tensor] = {}

    def collect(self) -> Names:
        """Fill the attributes from this rank's model, optimizers, data loaders and generators.

        Does not communicate.

        Returns:
            ``aliases`` and ``ties`` of this rank, for :func:`merge_aliases`.

        Raises:
            CheckpointError: a parameter is on the meta device; two values have the same name; an
                optimizer has parameters that are not in the model; a data loader has no state; or a
                value is not plain data.
        """
        on_meta = []
        for module in self.modules:
            remove_wrappers = _make_wrapper_remover(module)
            # keep_vars keeps the parameters themselves, whose attributes and ids are needed.
            for key, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor) and value.is_meta:
                    on_meta.append(key)
                self._add_to_model(remove_wrappers(key), value)
        if on_meta:
            names = format_items(on_meta, 4)
            raise CheckpointError(f"{names}: on the meta device; call model.to_empty(device=...) first")
        for number, optimizer in enumerate(self.optimizers):
            self._add_optimizer(number, optimizer)
        for number, loader in enumerate(self.loaders):
            if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
                raise CheckpointError(
                    f"data must have state_dict() and load_state_dict(), got {type(loader).__name__}; pass "
                    "torchdata's StatefulDataLoader, or save the number of the step, and call set_epoch and "
                    "skip the batches before it when the run resumes"
                )
            self._add(f"data.{number}", loader.state_dict())
        for name, state in seeds.collect_rng_states().items():
            self._add(f"random.{name}", state)
        return self.aliases, self.ties

    def _add_to_model(self, name: str, value: Any) -> None:
        """Add an item of the model's state dict; a parameter seen before becomes an alias."""
        entry = f"model.{name}"
        if value is not None and self._sources.get(entry) is value:
            return  # two modules of this rank share the parameter
        if isinstance(value, nn.Parameter):
            if self._names.setdefault(id(value), name) != name:
                self.aliases[name] = self._names[id(value)]
                return
            self.parameters.add(entry)
            tie = get_tie(value)
            if tie is not None:
                self.ties[tie] = name
        self._add(entry, value, value)

    def _add(self, name: str, value: Any, source: object = None) -> None:
        """Add a tensor or another object to ``values``, under the name of an entry.

        Args:
            name: the name of the entry.
            value: the tensor or object; None adds nothing.
            source: the parameter whose attributes describe how the tensor is sharded.
        """
        if value is None:
            return
        if not isinstance(value, Tensor):
            value = to_plain_data(value, format_entry_name(name))
        elif isinstance(source, Tensor):
            self._sources.setdefault(name, source)
            value = self._wrap_plain_shard(value, source)
            is_of_shard = isinstance(self.find_parameter(name), DTensor)
            if is_of_shard and value.ndim and not isinstance(value, DTensor):
                self.local.add(name)
        if name in self.values:
            remedy = "give a parameter to one optimizer"
            if name.startswith("model."):
                remedy = (
                    "save two models as one, nn.ModuleDict({'generator': ..., 'critic': ...}), and number "
                )
                remedy += "the layers of pipeline stages with training.stage_layers"
            raise CheckpointError(f"{format_entry_name(name)} is the name of two values; {remedy}")
        self.values[name] = value

    def find_parameter(self, name: str) -> Any:
        """Return the parameter for which an optimizer keeps the tensor of an entry.

        Args:
            name: the name of the entry.

        Returns:
            The parameter, as a DTensor if it is a shard; None for other entries.
        """
        if not name.startswith("optimizer."):
            return None
        return self.values.get(f"model.{split_entry_name(name)[0]}")

    def is_plain_shard(self, name: str) -> bool:
        """Return whether an optimizer's entry is for a plain shard with attributes."""
        source = self._sources.get(f"model.{split_entry_name(name)[0]}")
        return isinstance(self.find_parameter(name), DTensor) and not isinstance(source, DTensor)

    def _add_optimizer(self, number: int, optimizer: Optimizer) -> None:
        """Add the state of an optimizer and the options of its parameters.

        Args:
            number: the position of the optimizer in ``optimizers``.
            optimizer: the optimizer.
        """
        named = self._named_parameters(optimizer)
        if unknown := [tuple(param.shape) for name, param in named if not name]:
            problem = (
                f"the optimizer has parameters of shape {format_items(unknown)} that are not in the model"
            )
            remedy = (
                "create it from the current parameters of the model, after parallelize() and fully_shard()"
            )
            raise CheckpointError(f"{problem}; {remedy}")
        state_dict = optimizer.state_dict()
        own = {key: value for key, value in state_dict.items() if key not in {"state", "param_groups"}}
        for index, values in state_dict["state"].items():
            if not isinstance(index, int):  # torch numbers the parameters and keeps all other keys
                own.setdefault("state", {})[index] = values
                continue
            name, param = named[index]
            # The state of an optimizer is sharded as the parameter that it belongs to.
            for key, value in values.items():
                self._add(make_entry_name(name, key), value, param)
        if own:
            self._add(f"optimizers.{number}", own)
        self._add_options(number, optimizer)

    def _add_options(self, number: int, optimizer: Optimizer) -> None:
        """Add the options of an optimizer, for each of its parameters.

        The groups of another layout may have other parameters, so groups are not entries.
        """
        # A checkpoint may be loaded into a base class of its optimizer, or into a subclass.
        bases = type(optimizer).__mro__
        class_names = [base.__name__ for base in bases[: bases.index(Optimizer)]]
        options_of_groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            options_of_groups.append(to_plain_data(options, "an option of the optimizer"))
        for position, group in enumerate(optimizer.param_groups):
            entry = (class_names, options_of_groups[position], number * GROUPS + position, options_of_groups)
            for param in group["params"]:
                self.options[self._names[id(param)]] = entry

    def _named_parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """Return the parameters of an optimizer with their names in the model.

        The order is the numbering of ``optimizer.state_dict()``. The name is empty if the parameter
        is not in the model.
        """
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return [(self._names.get(id(param), ""), param) for param in params]

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
            pinned: the pinned tensors of the previous save, by entry name. They are overwritten and
                added to, so the previous save must have finished.
        """
        devices: set[torch.device] = set()
        for name, value in self.values.items():
            if not isinstance(value, Tensor):
                continue
            local = to_local(value)
            # Tensor subclasses, such as quantized optimizer states, know how they are copied.
            if local.device.type == "cpu" or type(local) not in {Tensor, nn.Parameter}:
                self.values[name] = value.to("cpu", copy=True)
                continue
            memory = pinned.get(name)
            if memory is None or (memory.shape, memory.dtype) != (local.shape, local.dtype):
                memory = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=True)
                pinned[name] = memory
            memory.copy_(local, non_blocking=True)
            devices.add(local.device)
            self.values[name] = replace_local_tensor(value, memory) if isinstance(value, DTensor) else memory
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()

    def apply(self, loaded: Mapping[str, Any], options: Options) -> None:
        """Copy loaded tensors and objects into the model, optimizers, data loaders and generators.

        Does not communicate.

        Args:
            loaded: the tensors and objects, by entry name.
            options: the saved options of the parameters that are loaded.
        """
        local = {name: self._to_plain_shard(name, value) for name, value in loaded.items()}
        # strict=False, because load() has checked the names of all ranks before it read anything.
        for module in self.modules:
            state_dict = {}
            remove_wrappers = _make_wrapper_remover(module)
            for key in module.state_dict(keep_vars=True):
                entry = f"model.{remove_wrappers(key)}"
                if entry in local and entry in self.values:
                    state_dict[key] = local[entry]
            module.load_state_dict(state_dict, strict=False)
        for number, optimizer in enumerate(self.optimizers):
            self._apply_to_optimizer(number, optimizer, local, options)
        for number, loader in enumerate(self.loaders):
            loader.load_state_dict(local[f"data.{number}"])
        random = {name: value for name, value in local.items() if name.startswith("random.")}
        seeds.restore_rng_states({name.removeprefix("random."): value for name, value in random.items()})

    def _to_plain_shard(self, name: str, value: Any) -> Any:
        """Return the local tensor if collect() made a DTensor of a plain shard, else the value."""
        source = self._sources.get(name)
        if source is None and name.startswith("optimizer."):
            source = self._sources.get(f"model.{split_entry_name(name)[0]}")
        if isinstance(value, DTensor) and source is not None and not isinstance(source, DTensor):
            return value.to_local()
        return value

    def _apply_to_optimizer(
        self, number: int, optimizer: Optimizer, loaded: Mapping[str, Any], options: Options
    ) -> None:
        """Call ``load_state_dict()`` of an optimizer with its loaded state and options.

        Parameters that are not loaded keep their state and options.

        Args:
            number: the position of the optimizer in ``optimizers``.
            optimizer: the optimizer.
            loaded: the tensors and objects, by entry name.
            options: the saved options of the parameters that are loaded.
        """
        named = self._named_parameters(optimizer)
        state_dict = optimizer.state_dict()
        entries = group_by_parameter(loaded)
        own = dict(loaded.get(f"optimizers.{number}", {}))
        state = dict(own.pop("state", {}))
        for index, (name, _) in enumerate(named):
            if name in entries:
                state[index] = {key: loaded[entry] for key, entry in entries[name].items()}
            elif name not in options and index in state_dict["state"]:
                state[index] = state_dict["state"][index]
        known = [options[name] for name, _ in named if name in options]
        for position, group in enumerate(state_dict["param_groups"]):
            names = [named[index][0] for index in group["params"]]
            saved = [options[name][1] for name in names if name in options]
            if known and not names:
                # Every parameter has the options of all groups, also of groups without parameters.
                saved = known[0][3][position : position + 1]
            if saved:
                group.update(saved[0])
        optimizer.load_state_dict({**state_dict, **own, "state": state})
        # torch converts all state except "step" to the dtype of the parameter. Restore the dtype.
        for name, param in named:
            for key, entry in entries.get(name, {}).items():
                value, converted = loaded[entry], optimizer.state[param][key]
                if isinstance(value, Tensor) and converted.dtype != value.dtype:
                    optimizer.state[param][key] = value.to(converted.device)


def group_by_parameter(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names ``optimizer.PARAMETER:KEY`` as ``{PARAMETER: {KEY: name}}``."""
    entries: dict[str, dict[str, str]] = {}
    for name in names:
        if name.startswith("optimizer."):
            param_name, key = split_entry_name(name)
            entries.setdefault(param_name, {})[key] = name
    return entries


def _make_wrapper_remover(module: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of DDP and other wrappers from a key."""
    prefixes = []  # of the modules that DDP wraps
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, DistributedDataParallel):
            prefixes.append(f"{name}." if name else "")

    def remove_wrappers(key: str) -> str:
        for prefix in reversed(prefixes):  # inner ones first: their names contain the outer ones
            if key.startswith(f"{prefix}module."):
                key = prefix + key.removeprefix(f"{prefix}module.")
        return seeds.strip_wrapper_names(key)

    return remove_wrappers


def make_entry_name(param_name: str, key: str) -> str:
    """Return the entry name of an optimizer's state for one parameter.

    Args:
        param_name: the name of the parameter.
        key: the key of the state, such as ``exp_avg``.
    """
    return f"optimizer.{_escape(param_name)}:{_escape(key)}"


def split_entry_name(entry: str) -> tuple[str, str]:
    """Return the parameter name and the key of ``optimizer.PARAMETER:KEY``."""
    # Older checkpoints do not escape a colon. It belongs to the name of the parameter then: keys
    # hardly ever have one.
    param_name, _, key = entry.removeprefix("optimizer.").rpartition(":")
    return _unescape(param_name), _unescape(key)


def _escape(name: str) -> str:
    """Escape the separator: names of modules and keys of optimizers may have any characters."""
    return name.replace("%", "%25").replace(":", "%3A")


def _unescape(name: str) -> str:
    return name.replace("%3A", ":").replace("%25", "%")


def replace_alias(name: str, aliases: Mapping[str, str]) -> str:
    """Replace a parameter's alias in an entry name by the name that it is saved under.

    Args:
        name: the name of an entry.
        aliases: the further names of parameters, and the names that they are saved under.
    """
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        param_name, key = split_entry_name(name)
        return make_entry_name(aliases[param_name], key) if param_name in aliases else name
    if kind == "model" and rest in aliases:
        return f"model.{aliases[rest]}"
    return name


def format_entry_name(name: str) -> str:
    """Format the name of an entry for messages, without its internal prefix."""
    kind, _, rest = name.partition(".")
    if kind == "optimizers":
        return f"optimizer {rest}"
    return repr(_unescape(rest) if kind == "optimizer" else rest)


def to_plain_data(value: object, name: str) -> Any:
    """Return a copy of an object as it is after a save and a load.

    Args:
        value: numbers, strings, tensors, and lists, tuples and dicts of them.
        name: the name of the object, for messages.

    Raises:
        CheckpointError: the object needs code to be read, which a checkpoint never runs.
    """
    # Writing and reading it once finds every value that the load would reject later.
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        return torch.load(written, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  each type has its own error
        remedy = "give numbers, strings, tensors, and lists, tuples and dicts of them"
        raise CheckpointError(f"{name} is not plain data ({get_first_line(error)}); {remedy}") from None
