"""A model, its optimizers and the place in the data, as a checkpoint holds them: by names that every layout knows.

An entry is *sharded* (a DTensor, or a shard with Megatron's marks), *shared* (the same on every rank that has it), or *per
rank*. A name is ``model.NAME``, ``optimizer.PARAMETER:KEY``, ``group.HASH`` (the options of some parameters), ``data.NUMBER``
or ``random.NAME``; ``rank.N.`` stands before what is per rank.
"""

from __future__ import annotations

import io
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from namedmesh.errors import CheckpointError, listing
from namedmesh.training.comparison import Entry, digest, shown
from namedmesh.training.initialization import plain_name, shard_of
from namedmesh.training.seeds import streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.mesh import NamedMesh

    Model = nn.Module | Sequence[nn.Module]
    Optimizers = Optimizer | Sequence[Optimizer] | None


class State:
    """What this rank saves: ``entries``, by name; refused where one stands for several values."""

    def __init__(
        self, mesh: NamedMesh | None, model: Model, optimizers: Optimizers = None, data: object = None
    ) -> None:
        self.mesh = mesh
        if mesh is not None:
            streams.follow(mesh.device)
        modules = [model] if isinstance(model, nn.Module) else list(model)
        self.modules = [
            each.module if isinstance(each, DistributedDataParallel) else each for each in modules
        ]
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
        given = [] if data is None else data
        self.loaders: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        self.entries: dict[str, Entry] = {}
        self.names: dict[int, str] = {}
        self._problems: list[str] = []
        self._add_model()
        for optimizer in self.optimizers:
            self._add_optimizer(optimizer)
        for number, loader in enumerate(self.loaders):
            self._add(f"data.{number}", loader.state_dict())
        for name, state in streams.state_dict().items():
            self._add(f"random.{name}", state)
        if self._problems:
            raise CheckpointError(*self._problems)

    def _add(self, name: str, value: Any, parameter: Tensor | None = None, *, averaged: bool = False) -> None:
        of_optimizer = name.startswith("optimizer.")
        shard, shape = self._place(value, parameter)
        replica = bool(shard) or (isinstance(value, nn.Parameter) and not of_optimizer)
        exact = not replica and not (averaged and of_optimizer)
        entry = Entry(value, parameter, averaged, shape if replica else None, shard, exact)
        if self.entries.setdefault(name, entry).value is not value:
            self._problems.append(
                f"{shown(name)} is the name of two values; name a layer by its number in the whole model, as "
                "training.stage_layers does, and give a parameter to one optimizer"
            )

    def _add_model(self) -> None:
        for module in self.modules:
            own = {id(each) for each in module.buffers()}
            # Kept as variables: the parameters themselves, by which their marks and optimizer state are found.
            for raw, value in module.state_dict(keep_vars=True).items():
                name = plain_name(raw)
                if isinstance(value, Tensor):
                    averaged = id(value) in own and value.is_floating_point()
                    self._add(f"model.{name}", value, value, averaged=averaged)
                    self.names.setdefault(id(value), name)
                elif value is not None:
                    self._add(f"model.{name}", value)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        parameters = self.parameters(optimizer)
        unknown = [tuple(each.shape) for name, each in parameters if not name]
        if unknown:
            self._problems.append(
                f"the optimizer has parameters of shape {listing(unknown)} that the model has not; make it from the "
                "parameters that the model has now"
            )
        for index, kept in optimizer.state_dict()["state"].items():
            if not isinstance(index, int):
                self._problems.append(
                    f"the optimizer keeps {index!r} for itself; a checkpoint has what it keeps for each parameter"
                )
                continue
            name, parameter = parameters[index]
            for key, value in kept.items():
                averaged = False
                if isinstance(value, Tensor) and value.ndim and not isinstance(parameter, DTensor):
                    averaged = value.shape == parameter.shape and value.is_floating_point()
                self._add(f"optimizer.{name}:{key}", value, parameter, averaged=averaged)
        for content in groups_of(optimizer, parameters):
            name = f"group.{digest(content):x}"
            if name not in self.entries:
                self._add(name, content)

    def parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """Return an optimizer's parameters with their names, in the order in which torch numbers them."""
        return [
            (self.names.get(id(each), ""), each)
            for group in optimizer.param_groups
            for each in group["params"]
        ]

    def compared(self) -> dict[str, Entry]:
        """Return what ranks compare: all but the options, which are named by what they are, and shards of optimizers."""
        return {
            name: entry
            for name, entry in sorted(self.entries.items(), key=itemgetter(0))
            if not name.startswith("group.") and not (entry.shard and name.startswith("optimizer."))
        }

    def _place(self, value: Any, parameter: Tensor | None) -> tuple[tuple[object, ...], tuple[int, ...]]:
        """Return which part of a tensor this rank has, empty for all of it, and the shape of the whole."""
        if not isinstance(value, Tensor):
            return (), ()
        value = whole(value, parameter, self.mesh, exchange=False)
        if not isinstance(value, DTensor):
            return (), tuple(value.shape)
        where: Sequence[int] = value.device_mesh.get_coordinate() or []
        placed = zip(value.placements, value.device_mesh.shape, where, strict=False)
        shard = tuple((str(each), size, place) for each, size, place in placed if not each.is_replicate())
        return shard or ("whole",), tuple(value.shape)

    def objects(self) -> dict[str, Any]:
        """Return copies of all entries that are no tensors, which have to be plain data."""
        return {
            name: plain(entry.value, shown(name))
            for name, entry in self.entries.items()
            if not isinstance(entry.value, Tensor)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors as a checkpoint holds them; may communicate."""
        return {
            name: whole(entry.value, entry.parameter, self.mesh)
            for name, entry in self.entries.items()
            if isinstance(entry.value, Tensor)
        }

    def put_model(self, loaded: Mapping[str, Any]) -> None:
        """Load parameters, buffers and extra states through ``load_state_dict``."""
        for module in self.modules:
            names = {raw: f"model.{plain_name(raw)}" for raw in module.state_dict(keep_vars=True)}
            found = {raw: loaded[name] for raw, name in names.items() if name in loaded}
            module.load_state_dict(found, strict=False)

    def put_optimizer(
        self,
        optimizer: Optimizer,
        options: Mapping[str, Mapping[str, Any]],
        loaded: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Load an optimizer's options, and what it keeps for each parameter, through ``load_state_dict``."""
        parameters = self.parameters(optimizer)
        packed = optimizer.state_dict()
        for group, content in zip(packed["param_groups"], groups_of(optimizer, parameters), strict=True):
            group.update(options[content["names"][0]] if content["names"] else {})
        kept = [loaded.get(name, {}) for name, _ in parameters]
        packed["state"] = {number: dict(each) for number, each in enumerate(kept) if each}
        optimizer.load_state_dict(packed)
        for (_, parameter), each in zip(parameters, kept, strict=True):
            for key, value in each.items():
                now = optimizer.state[parameter].get(key)
                # torch gives what is no step the type of the parameter.
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(now.device)


def groups_of(optimizer: Optimizer, parameters: Sequence[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Return the options of each group of parameters, the names in it, and the kind of optimizer."""
    names = [name for name, _ in parameters]
    kinds = [each.__name__ for each in type(optimizer).__mro__]
    kinds = kinds[: kinds.index("Optimizer")]
    found = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
        count = len(group["params"])
        found.append({"kinds": kinds, "options": options, "names": names[:count]})
        names = names[count:]
    return found


def whole(
    tensor: Tensor, parameter: Tensor | None, mesh: NamedMesh | None, *, exchange: bool = True
) -> Tensor:
    """Return a tensor as a checkpoint holds it: a marked shard becomes a DTensor of the whole, on the same memory.

    Where the whole was cut in blocks, the ranks of the axis ``exchange`` them first, and the memory is another.
    """
    if isinstance(tensor, DTensor):
        return tensor  # to detach one takes as long as to copy it
    tensor, cut = tensor.detach(), shard_of(parameter, mesh)
    if mesh is None or parameter is None or cut is None or tensor.shape != parameter.shape:
        return tensor
    axis, dim, blocks = cut
    if exchange and blocks > 1:
        tensor = _exchanged(tensor, mesh, axis, dim, (mesh.size(axis), blocks))
    return DTensor.from_local(tensor, mesh[axis], [Shard(dim)], run_check=False)


def local(loaded: Tensor, parameter: Tensor | None, mesh: NamedMesh | None) -> Tensor:
    """Return the inverse of :func:`whole`."""
    cut = shard_of(parameter, mesh)
    if mesh is None or cut is None or not isinstance(loaded, DTensor):
        return loaded
    axis, dim, blocks = cut
    shard = loaded.to_local()
    return _exchanged(shard, mesh, axis, dim, (blocks, mesh.size(axis))) if blocks > 1 else shard


def _exchanged(shard: Tensor, mesh: NamedMesh, axis: str, dim: int, parts: tuple[int, int]) -> Tensor:
    """Return this rank's shard after the parts of all shards changed from the one order to the other."""
    joined: Tensor = DTensor.from_local(shard, mesh[axis], [Shard(dim)], run_check=False).full_tensor()
    other: Tensor = joined.unflatten(dim, (*parts, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    mine: Tensor = other.chunk(mesh.size(axis), dim)[mesh.rank(axis)]
    return mine.contiguous()


def plain(value: object, what: str) -> Any:
    """Return a copy of a value as a checkpoint gives it back; refuse what only code could read back."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        return torch.load(written, weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  of many kinds, by what torch finds
        cause = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{what} is not plain data ({cause}); give numbers, texts, tensors, and lists, tuples and dicts of them"
        ) from None
