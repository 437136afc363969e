"""The values that a rank saves and loads, under names that every layout knows.

The names of entries are ``model.NAME``, ``optimizer.PARAMETER:KEY`` (see :func:`make_entry_name`),
``random.NAME`` and ``data.NUMBER``. ``optimizers.NUMBER`` is what an optimizer keeps in addition to
the state of its parameters.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from namedmesh._torch import replace_local_tensor
from namedmesh.errors import CheckpointError, format_items
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import find_plain_shard, to_local
from namedmesh.training import seeds
from namedmesh.training.tying import tie_of

Model: TypeAlias = nn.Module | Sequence[nn.Module]
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None

Options = dict[str, tuple[list[str], dict[str, Any], int, list[dict[str, Any]]]]
"""For each optimized parameter: the classes of its optimizer, the options of its group, the number
of its group, and the options of all groups of the optimizer, including those without parameters."""

GROUPS = 10**6
"""The group at a position of an optimizer has the number ``GROUPS * optimizer + position``."""

Names: TypeAlias = tuple[dict[str, str], dict[tuple[str, str], str]]
"""Further names of parameters, which have no values, and whose they are; what tie_stages() has tied, by the tie and the end of it."""


class State:
    """A model, its optimizers, the random generators and the place in the data of this rank."""

    def __init__(
        self, mesh: NamedMesh | None, model: Model, optimizers: Optimizers = None, data: object = None
    ) -> None:
        self.mesh = mesh
        self.modules = [model] if isinstance(model, nn.Module) else list(model)
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
        loaders: Any = data if isinstance(data, list | tuple) else [data]
        self.loaders = [each for each in loaders if each is not None]
        self.extra: dict[str, Any] = {}  # values of the caller
        self.values: dict[str, Any] = {}  # tensors (shards as DTensors), and copies of what is none
        self.parameters: set[str] = set()  # of the model: replicas of them have to be equal
        self.aliases: dict[str, str] = {}  # as in Names
        self.ties: dict[tuple[str, str], str] = {}
        self.options: Options = {}
        # Names of plain tensors that optimizers keep for parameters that are DTensors.
        self.local: set[str] = set()
        self._names: dict[int, str] = {}  # of parameters, by identity
        self._sources: dict[str, Tensor] = {}  # by name, the parameter of which an entry is a part

    def collect(self) -> Names:
        """Find all values, and return the names that ranks tell each other: the further ones, and those of ties."""
        on_meta = []
        for module in self.modules:
            name_of = _without_wrappers(module)
            # Kept as variables: the parameters themselves, by which their marks and optimizer state are found.
            for raw, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor) and value.is_meta:
                    on_meta.append(raw)
                self._add_to_model(name_of(raw), value)
        if on_meta:
            remedy = "call model.to_empty(device=...) first"
            raise CheckpointError(f"{format_items(on_meta, 4)}: on the meta device; {remedy}")
        for number, optimizer in enumerate(self.optimizers):
            self._add_optimizer(number, optimizer)
        for number, loader in enumerate(self.loaders):
            self._add(f"data.{number}", loader.state_dict())
        for name, state in seeds.random_state().items():
            self._add(f"random.{name}", state)
        return self.aliases, self.ties

    def _add_to_model(self, name: str, value: Any) -> None:
        entry = f"model.{name}"
        if value is not None and self._sources.get(entry) is value:
            return  # two modules of a rank share it
        if isinstance(value, nn.Parameter):
            if self._names.setdefault(id(value), name) != name:
                self.aliases[name] = self._names[id(value)]
                return
            self.parameters.add(entry)
            tie = tie_of(value)
            if tie is not None:
                self.ties[tie] = name
        self._add(entry, value, value)

    def _add(self, name: str, value: Any, source: object = None) -> None:
        if value is None:
            return
        if not isinstance(value, Tensor):
            value = to_plain_data(value, display_name(name))
        elif isinstance(source, Tensor):
            self._sources.setdefault(name, source)
            value = self._as_shard(value, source)
            of_shard = isinstance(self.parameter_of(name), DTensor)
            if of_shard and value.ndim and not isinstance(value, DTensor):
                self.local.add(name)
        if name in self.values:
            remedy = "give a parameter to one optimizer"
            if name.startswith("model."):
                remedy = (
                    "save two models as one, nn.ModuleDict({'generator': ..., 'critic': ...}), and number "
                    "the layers of pipeline stages with training.stage_layers"
                )
            raise CheckpointError(f"{display_name(name)} is the name of two values; {remedy}")
        self.values[name] = value

    def parameter_of(self, name: str) -> Any:
        """Return the parameter of an optimizer's entry, a marked one as a DTensor; else None."""
        if not name.startswith("optimizer."):
            return None
        return self.values.get(f"model.{split_entry_name(name)[0]}")

    def is_plain_shard(self, name: str) -> bool:
        """Return whether the parameter of an optimizer's entry is a plain shard of Megatron's."""
        source = self._sources.get(f"model.{split_entry_name(name)[0]}")
        return isinstance(self.parameter_of(name), DTensor) and not isinstance(source, DTensor)

    def _add_optimizer(self, number: int, optimizer: Optimizer) -> None:
        named = self._named(optimizer)
        if unknown := [tuple(each.shape) for name, each in named if not name]:
            what = f"the optimizer has parameters of shape {format_items(unknown)} that the model has not"
            raise CheckpointError(f"{what}; make it from the parameters that the model has now")
        packed = optimizer.state_dict()
        own = {key: value for key, value in packed.items() if key not in {"state", "param_groups"}}
        for index, kept in packed["state"].items():
            if not isinstance(index, int):  # torch numbers the parameters and keeps all other keys
                own.setdefault("state", {})[index] = kept
                continue
            name, parameter = named[index]
            for key, value in kept.items():
                self._add(make_entry_name(name, key), value, parameter)
        if own:
            self._add(f"optimizers.{number}", own)
        kinds = [each.__name__ for each in type(optimizer).__mro__]
        kinds = kinds[: kinds.index("Optimizer")]
        contents: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            options = {key: each for key, each in group.items() if key not in {"params", "param_names"}}
            contents.append(to_plain_data(options, "an option of the optimizer"))
        for position, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name, place = self._names[id(parameter)], number * GROUPS + position
                self.options[name] = kinds, contents[position], place, contents

    def _named(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """Return an optimizer's parameters with their names, in the order in which torch numbers them."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return [(self._names.get(id(each), ""), each) for each in parameters]

    def _as_shard(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return a plain shard with Megatron's marks as a DTensor on the same memory, and any other tensor as it is."""
        if isinstance(tensor, DTensor):
            return tensor  # to detach one takes as long as to copy it
        tensor = tensor.detach()
        shard = find_plain_shard(parameter, self.mesh)
        if shard is None or tensor.shape != parameter.shape:
            return tensor
        if shard.num_blocks > 1:
            raise CheckpointError(
                f"a shard of {shard.num_blocks} blocks (partition_stride); make a parameter of each"
            )
        return DTensor.from_local(tensor, shard.mesh, [Shard(shard.dim)], run_check=False)

    @torch.no_grad()
    def reduce_partial(self) -> None:
        """All-reduce partial values, such as norms that an optimizer keeps: DCP rejects them.

        Collective: every rank must call it, after all ranks have collected.
        """
        for name, value in self.values.items():
            if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
                reduced: list[Placement] = list(value.placements)
                for dim, place in enumerate(reduced):
                    if place.is_partial():
                        reduced[dim] = Replicate()
                self.values[name] = value.redistribute(placements=reduced)

    @torch.no_grad()
    def copy_to_cpu(self, pinned: dict[str, Tensor]) -> None:
        """Copy the tensors to the CPU, for a save in the background.

        Copies from an accelerator go to pinned memory and do not wait for each other. Pinned memory is
        slow to get, so the memory of the save before is used again.

        Args:
            pinned: the memory, by the names of entries. It is filled here; no other save may read it.
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

    def apply(self, found: Mapping[str, Any], options: Options) -> None:
        """Give the loaded values to the model, the optimizers, the loaders and the generators.

        Args:
            found: the values, by the names of entries.
            options: the saved options of the parameters that are loaded.
        """
        local = {name: self._as_here(name, value) for name, value in found.items()}
        for module in self.modules:
            own = {}
            name_of = _without_wrappers(module)
            for raw in module.state_dict(keep_vars=True):
                entry = f"model.{name_of(raw)}"
                if entry in local and entry in self.values:
                    own[raw] = local[entry]
            module.load_state_dict(own, strict=False)
        for number, optimizer in enumerate(self.optimizers):
            self._put_optimizer(number, optimizer, local, options)
        for number, loader in enumerate(self.loaders):
            loader.load_state_dict(local[f"data.{number}"])
        random = {name: each for name, each in local.items() if name.startswith("random.")}
        seeds.set_random_state({name.removeprefix("random."): each for name, each in random.items()})

    def _as_here(self, name: str, value: Any) -> Any:
        source = self._sources.get(name)
        if source is None and name.startswith("optimizer."):
            source = self._sources.get(f"model.{split_entry_name(name)[0]}")
        if isinstance(value, DTensor) and source is not None and not isinstance(source, DTensor):
            return value.to_local()
        return value

    def _put_optimizer(
        self, number: int, optimizer: Optimizer, found: Mapping[str, Any], options: Options
    ) -> None:
        named, packed = self._named(optimizer), optimizer.state_dict()
        entries = group_by_parameter(found)
        own = dict(found.get(f"optimizers.{number}", {}))
        state = dict(own.pop("state", {}))
        for index, (name, _) in enumerate(named):
            if name in entries:
                state[index] = {key: found[entry] for key, entry in entries[name].items()}
            elif name not in options and index in packed["state"]:  # not loaded: it stays as it is
                state[index] = packed["state"][index]
        loaded = [options[name] for name, _ in named if name in options]
        for position, group in enumerate(packed["param_groups"]):
            names = [named[index][0] for index in group["params"]]
            saved = [options[name][1] for name in names if name in options]
            if loaded and not names:  # an empty group: all groups are known from any parameter
                saved = loaded[0][3][position : position + 1]
            group.update(saved[0] if saved else {})
        optimizer.load_state_dict({**packed, **own, "state": state})
        for name, parameter in named:  # torch gives what is no step the type of the parameter
            for key, entry in entries.get(name, {}).items():
                value, now = found[entry], optimizer.state[parameter][key]
                if isinstance(value, Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(now.device)


def group_by_parameter(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of optimizers' entries, by parameter and key."""
    entries: dict[str, dict[str, str]] = {}
    for name in names:
        if name.startswith("optimizer."):
            parameter, key = split_entry_name(name)
            entries.setdefault(parameter, {})[key] = name
    return entries


def _without_wrappers(module: nn.Module) -> Callable[[str], str]:
    """Return a function from a key of a state dict to its name without torch's wrappers."""
    replicated = []
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, DistributedDataParallel):
            replicated.append(f"{name}." if name else "")

    def name_of(key: str) -> str:
        for wrapper in reversed(replicated):  # inner ones first: their names contain the outer ones
            if key.startswith(f"{wrapper}module."):
                key = wrapper + key.removeprefix(f"{wrapper}module.")
        return seeds.plain_name(key)

    return name_of


def make_entry_name(parameter: str, key: str) -> str:
    """Return the name of the entry of an optimizer for one parameter."""
    return f"optimizer.{_escaped(parameter)}:{_escaped(key)}"


def split_entry_name(entry: str) -> tuple[str, str]:
    """Return the parameter and the key of ``optimizer.PARAMETER:KEY``."""
    # Older checkpoints do not escape a colon. It is in the parameter's name then: keys hardly ever
    # have one.
    parameter, _, key = entry.removeprefix("optimizer.").rpartition(":")
    return _unescaped(parameter), _unescaped(key)


def _escaped(name: str) -> str:
    """Return a name without the separator, as modules and optimizers may use any characters."""
    return name.replace("%", "%25").replace(":", "%3A")


def _unescaped(name: str) -> str:
    return name.replace("%3A", ":").replace("%25", "%")


def canonical_name(name: str, aliases: Mapping[str, str]) -> str:
    """Return the name under which a checkpoint has an entry of a parameter with several names."""
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        parameter, key = split_entry_name(name)
        return make_entry_name(aliases[parameter], key) if parameter in aliases else name
    return f"model.{aliases[rest]}" if kind == "model" and rest in aliases else name


def display_name(name: str) -> str:
    """Return the name of an entry as messages have it."""
    kind, _, rest = name.partition(".")
    if kind == "optimizers":
        return f"optimizer {rest}"
    return repr(_unescaped(rest) if kind == "optimizer" else rest)


def to_plain_data(value: object, what: str) -> Any:
    """Return a copy of a value as a checkpoint gives it back; refuse what only code could read back."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        return torch.load(written, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  of many kinds, by what torch finds
        cause = str(error).strip().partition("\n")[0]
        remedy = "give numbers, texts, tensors, and lists, tuples and dicts of them"
        raise CheckpointError(f"{what} is not plain data ({cause}); {remedy}") from None
