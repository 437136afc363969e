"""A model and its optimizer as a checkpoint holds them: whole tensors, under names that every layout knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from namedmesh.errors import listing
from namedmesh.tensor_parallel.collectives import local_shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from namedmesh.mesh import NamedMesh

    Model = nn.Module | Sequence[nn.Module]

# What torch's wrappers put into the names of the modules inside them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_SAMPLE = 65536  # elements of a tensor that are compared between ranks
_TOLERANCE = (
    1e-3  # replicas may differ by what rounding adds up to over a run; different tensors differ by more
)


def modules_of(model: Model) -> list[nn.Module]:
    """Return the modules that a rank holds: one, or several stages of a pipeline; what DDP wraps, without it."""
    modules = [model] if isinstance(model, nn.Module) else list(model)
    return [each.module if isinstance(each, DistributedDataParallel) else each for each in modules]


def clean(name: str) -> str:
    """Return the name of a parameter in the model as it was written."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


class State:
    """The tensors of a model and its optimizer on this rank, by name.

    Attributes:
        entries: parameters and buffers by name; a tied one has several names.
        objects: what else the modules keep (extra state), by name.
        problems: names that stand for several tensors, and parameters of the optimizer that have none.
    """

    def __init__(self, mesh: NamedMesh | None, model: Model, optimizer: Optimizer | None) -> None:
        self.mesh, self.model = mesh, model
        self.groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
        self.remembered: Mapping[Tensor, Any] = {} if optimizer is None else optimizer.state
        self.entries: dict[str, Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.problems: list[str] = []
        for module in modules_of(model):
            # Kept as variables: the parameters themselves, by which their marks and optimizer state are found.
            for raw, value in module.state_dict(keep_vars=True).items():
                name = clean(raw)
                if not isinstance(value, Tensor):
                    self.objects |= {name: value} if value is not None else {}
                elif self.entries.setdefault(name, value) is not value:
                    self.problems.append(
                        f"{name!r} is the name of two tensors; name a layer by its number in the whole model, "
                        "as training.stage_layers does"
                    )
        self.names = {id(value): name for name, value in reversed(self.entries.items())}
        unknown = [tuple(each.shape) for name, each in self.parameters() if not name]
        if unknown:
            self.problems.append(
                f"the optimizer has parameters of shape {listing(unknown)} that the model has not; make it from the "
                "parameters that the model has now"
            )

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return the optimizer's parameters with their names, in the order in which torch numbers them."""
        return [(self.names.get(id(each), ""), each) for group in self.groups for each in group["params"]]

    def aliases(self, name: str) -> list[str]:
        """Return the names that the tensor of this name has."""
        return [other for other, value in self.entries.items() if value is self.entries[name]]

    def model_tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers as a checkpoint holds them, by name."""
        return {name: whole(value, value, self.mesh) for name, value in self.entries.items()}

    def optimizer_options(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Return the options of each group of parameters, and the names in it."""
        return [
            (
                {key: value for key, value in group.items() if key not in {"params", "param_names"}},
                [self.names.get(id(each), "") for each in group["params"]],
            )
            for group in self.groups
        ]

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return what the optimizer remembers of each parameter that it has stepped, as a checkpoint holds it."""
        return {
            name: {
                key: whole(value, parameter, self.mesh) if isinstance(value, Tensor) else value
                for key, value in self.remembered[parameter].items()
            }
            for name, parameter in self.parameters()
            if parameter in self.remembered
        }

    def room_for_optimizer(
        self, saved: Mapping[str, Any], shapes: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return tensors to load the state of the optimizer into, as a checkpoint holds them.

        Args:
            saved: the names of the tensors that the checkpoint has for each parameter.
            shapes: the whole shape and type of each.
        """
        room: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters():
            for key in saved[name][0] if name in saved else ():
                shape, dtype = shapes[f"optimizer.{name}.{key}"]
                present = self.remembered[parameter].get(key) if parameter in self.remembered else None
                if (
                    present is None
                    and key != "step"
                    and shape == tuple(whole(parameter, parameter, self.mesh).shape)
                ):
                    present = torch.zeros_like(parameter.detach(), dtype=dtype)
                found = (
                    torch.empty(shape, dtype=dtype)
                    if present is None
                    else whole(present, parameter, self.mesh)
                )
                room.setdefault(name, {})[key] = found
        return room

    def put_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what was loaded for the parameters and buffers; most of it is in its place already."""
        for name, tensor in tensors.items():
            cut = shard_of(self.entries[name], self.mesh)
            if cut is not None and cut[-1] > 1:
                self.entries[name].detach().copy_(local(tensor, self.entries[name], self.mesh))

    def put_objects(self, objects: Mapping[str, Any]) -> None:
        """Restore the extra states of the modules."""
        for module in modules_of(self.model):
            found = {raw: objects[clean(raw)] for raw in module.state_dict() if clean(raw) in objects}
            if found:
                module.load_state_dict(found, strict=False)

    def put_optimizer(
        self,
        optimizer: Optimizer,
        options: Mapping[str, Mapping[str, Any]],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Load the optimizer's options and state, by the names of the parameters."""
        packed = optimizer.state_dict()
        for group, (_, names) in zip(packed["param_groups"], self.optimizer_options(), strict=True):
            group.update(options[names[0]] if names else {})
        packed["state"] = {
            number: {key: local(value, parameter, self.mesh) for key, value in state[name].items()}
            for number, (name, parameter) in enumerate(self.parameters())
            if name in state
        }
        optimizer.load_state_dict(packed)


def shard_of(parameter: Tensor, mesh: NamedMesh | None) -> tuple[str, int, int] | None:
    """Return the axis over which a plain tensor is cut, the dim and the number of blocks, by Megatron's marks."""
    if (
        mesh is None
        or isinstance(parameter, DTensor)
        or not getattr(parameter, "tensor_model_parallel", False)
    ):
        return None
    axis = "tp" if getattr(parameter, "allreduce", True) or "etp" not in mesh.coords else "etp"
    if axis not in mesh.coords or mesh.size(axis) == 1:
        return None
    return axis, int(getattr(parameter, "partition_dim", 0)), int(getattr(parameter, "partition_stride", 1))


def whole(tensor: Tensor, parameter: Tensor, mesh: NamedMesh | None) -> Tensor:
    """Return a tensor as a checkpoint holds it: a marked shard becomes a DTensor of the whole, on the same memory.

    Where the whole was cut in blocks, the ranks of the axis exchange them first, and the memory is another.
    """
    tensor, cut = tensor.detach(), shard_of(parameter, mesh)
    if mesh is None or cut is None or tensor.shape != parameter.shape:
        return tensor
    axis, dim, blocks = cut
    if blocks > 1:
        tensor = _exchanged(tensor, mesh, axis, dim, (mesh.size(axis), blocks))
    return DTensor.from_local(tensor, mesh[axis], [Shard(dim)], run_check=False)


def local(loaded: Any, parameter: Tensor, mesh: NamedMesh | None) -> Any:
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


Print = tuple[tuple[int, ...], tuple[object, ...], tuple[float, ...]]


def fingerprint(tensor: Tensor) -> Print:
    """Return the whole shape, which shard this rank has, and three numbers that differ between different shards."""
    cut: tuple[object, ...] = ()
    if isinstance(tensor, DTensor):
        where: Sequence[int] = tensor.device_mesh.get_coordinate() or []
        sizes = tensor.device_mesh.shape
        placed = zip(tensor.placements, sizes, where, strict=False)
        cut = tuple((str(each), size, place) for each, size, place in placed if not each.is_replicate())
    plain = local_shard(tensor).detach().reshape(-1)
    some = plain[:: max(1, plain.numel() // _SAMPLE)].double()
    angles = torch.arange(some.numel(), device=some.device, dtype=some.dtype)
    numbers = torch.stack([some.norm(), some @ angles.cos(), some @ angles.sin()])
    return tuple(tensor.shape), cut, tuple(numbers.tolist())


def contradictions(by_rank: Sequence[Mapping[str, Print]]) -> list[str]:
    """Return the names that stand for different tensors on different ranks, one sentence for each."""
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    seen: dict[object, tuple[tuple[float, ...], int]] = {}
    found: dict[str, str] = {}
    for rank, prints in enumerate(by_rank):
        for name, (shape, cut, numbers) in prints.items():
            first_shape, first = shapes.setdefault(name, (shape, rank))
            if shape != first_shape:
                found.setdefault(name, f"shape {first_shape} on rank {first} and {shape} on rank {rank}")
            first_numbers, first = seen.setdefault((name, cut), (numbers, rank))
            pairs = list(zip(numbers, first_numbers, strict=True))
            if max(abs(a - b) for a, b in pairs) > _TOLERANCE * max(abs(number) for number in pairs[0]):
                found.setdefault(name, f"other values on rank {rank} than on rank {first}")
    by_cause: dict[str, list[str]] = {}
    for name, what in found.items():
        by_cause.setdefault(what, []).append(repr(name))
    return [
        f"{listing(names)}: {what}, and a checkpoint holds one tensor of a name; replicas have to be equal, a layer "
        "has its number in the whole model in its name (training.stage_layers), and plain shards are marked with "
        "tensor_model_parallel and partition_dim"
        for what, names in by_cause.items()
    ]
