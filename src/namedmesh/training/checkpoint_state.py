"""What a rank saves and loads, by names that every layout knows: ``model.NAME``, ``optimizer.PARAMETER:KEY``, ``random.NAME``, ``data.NUMBER``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from namedmesh.errors import CheckpointError, listing
from namedmesh.mesh import NamedMesh
from namedmesh.training import seeds
from namedmesh.training.tying import tie_of

Model: TypeAlias = nn.Module | Sequence[nn.Module]
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None

Options = dict[str, tuple[list[str], dict[str, Any], int]]
"""Of each optimized parameter the kinds of its optimizer, the options, and the number of its group."""

Names: TypeAlias = tuple[dict[str, str], dict[tuple[str, str], str]]
"""Further names of parameters, which have no values, and whose they are; what tie_stages() has tied, by the tie and the end of it."""


class State:
    """A model, its optimizers, the random generators and the place in the data of this rank."""

    def __init__(
        self, mesh: NamedMesh | None, model: Model, optimizers: Optimizers = None, data: object = None
    ) -> None:
        self.mesh = mesh
        modules = [model] if isinstance(model, nn.Module) else model
        self.modules = [
            each.module if isinstance(each, DistributedDataParallel) else each for each in modules
        ]
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
        loaders: Any = data if isinstance(data, list | tuple) else [data]
        self.loaders = [each for each in loaders if each is not None]
        self.extra: dict[str, Any] = {}  # values of the caller
        self.values: dict[str, Any] = {}  # tensors (shards as DTensors), and copies of what is none
        self.parameters: set[str] = set()  # of the model: replicas of them have to be equal
        self.aliases: dict[str, str] = {}  # as in Names
        self.ties: dict[tuple[str, str], str] = {}
        self.options: Options = {}
        self._names: dict[int, str] = {}  # of parameters, by identity
        self._sources: dict[str, Tensor] = {}  # by name, the parameter of which an entry is a part

    def collect(self) -> Names:
        """Find all values, and return the names that ranks tell each other: the further ones, and those of ties."""
        for module in self.modules:
            # Kept as variables: the parameters themselves, by which their marks and optimizer state are found.
            for raw, value in module.state_dict(keep_vars=True).items():
                self._add_to_model(seeds.plain_name(raw), value)
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
            value = plain(value, shown(name))
        elif isinstance(source, Tensor):
            self._sources.setdefault(name, source)
            value = self._as_shard(value, source)
        if name in self.values:
            remedy = "number layers with training.stage_layers, and give a parameter to one optimizer"
            raise CheckpointError(f"{shown(name)} is the name of two values; {remedy}")
        self.values[name] = value

    def _add_optimizer(self, number: int, optimizer: Optimizer) -> None:
        named = self._named(optimizer)
        if unknown := [tuple(each.shape) for name, each in named if not name]:
            what = f"the optimizer has parameters of shape {listing(unknown)} that the model has not"
            raise CheckpointError(f"{what}; make it from the parameters that the model has now")
        for index, kept in optimizer.state_dict()["state"].items():
            name, parameter = named[index]
            for key, value in kept.items():
                self._add(f"optimizer.{name}:{key}", value, parameter)
        kinds = [each.__name__ for each in type(optimizer).__mro__]
        kinds = kinds[: kinds.index("Optimizer")]
        for place, group in enumerate(optimizer.param_groups):
            options = {key: each for key, each in group.items() if key not in {"params", "param_names"}}
            content = plain(options, "an option of the optimizer")
            for each in group["params"]:
                self.options[self._names[id(each)]] = kinds, content, 1000 * number + place

    def _named(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """Return an optimizer's parameters with their names, in the order in which torch numbers them."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return [(self._names.get(id(each), ""), each) for each in parameters]

    def _as_shard(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Return a plain shard with Megatron's marks as a DTensor on the same memory, and any other tensor as it is."""
        if isinstance(tensor, DTensor):
            return tensor  # to detach one takes as long as to copy it
        tensor, cut = tensor.detach(), seeds.shard_of(parameter, self.mesh)
        if cut is None or tensor.shape != parameter.shape:
            return tensor
        ranks, dim, blocks = cut
        if blocks > 1:
            raise CheckpointError(f"a shard of {blocks} blocks (partition_stride); make a parameter of each")
        return DTensor.from_local(tensor, ranks, [Shard(dim)], run_check=False)

    @torch.no_grad()
    def copy(self) -> None:
        """Take copies of the tensors, for the background."""
        for name, each in self.values.items():
            self.values[name] = each.to("cpu", copy=True) if isinstance(each, Tensor) else each

    def put(self, found: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Give the loaded values to the model, the optimizers, the loaders and the generators."""
        local = {name: self._as_here(name, value) for name, value in found.items()}
        for module in self.modules:
            names = {raw: f"model.{seeds.plain_name(raw)}" for raw in module.state_dict(keep_vars=True)}
            own = {raw: local[name] for raw, name in names.items() if name in local and name in self.values}
            module.load_state_dict(own, strict=False)
        for optimizer in self.optimizers:
            self._put_optimizer(optimizer, local, options)
        for number, loader in enumerate(self.loaders):
            loader.load_state_dict(local[f"data.{number}"])
        random = {name: each for name, each in local.items() if name.startswith("random.")}
        seeds.set_random_state({name.removeprefix("random."): each for name, each in random.items()})

    def _as_here(self, name: str, value: Any) -> Any:
        source = self._sources.get(name if name in self._sources else "model." + owner(name))
        if isinstance(value, DTensor) and source is not None and not isinstance(source, DTensor):
            return value.to_local()
        return value

    def _put_optimizer(
        self, optimizer: Optimizer, found: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        named, packed = self._named(optimizer), optimizer.state_dict()
        kept: dict[str, dict[str, Any]] = {}
        for name, value in found.items():
            if name.startswith("optimizer."):
                kept.setdefault(owner(name), {})[name.partition(":")[2]] = value
        for group in packed["param_groups"]:
            if group["params"]:
                group.update(options[named[group["params"][0]][0]][1])
        packed["state"] = {number: kept[name] for number, (name, _) in enumerate(named) if name in kept}
        optimizer.load_state_dict(packed)
        for name, parameter in named:  # torch gives what is no step the type of the parameter
            for key, value in kept.get(name, {}).items():
                now = optimizer.state[parameter][key]
                if isinstance(value, Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(now.device)


def owner(name: str) -> str:
    """Return the parameter of ``optimizer.PARAMETER:KEY``."""
    return name.removeprefix("optimizer.").partition(":")[0]


def of_owner(name: str, aliases: Mapping[str, str]) -> str:
    """Return the name under which a checkpoint has an entry of a parameter with several names."""
    kind, _, rest = name.partition(".")
    parameter, colon, key = rest.partition(":") if kind == "optimizer" else (rest, "", "")
    return f"{kind}.{aliases[parameter]}{colon}{key}" if parameter in aliases else name


def shown(name: str) -> str:
    """Return the name of an entry as messages have it."""
    return repr(name.partition(".")[2])


def plain(value: object, what: str) -> Any:
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
