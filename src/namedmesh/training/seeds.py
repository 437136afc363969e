"""Random numbers that differ between ranks where they should, and first weights that do not depend on the layout."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import get_worker_info

from namedmesh.axes import SAME_SAMPLE_AXES
from namedmesh.errors import TrainingError, listing
from namedmesh.mesh import NamedMesh, current_mesh

_places: dict[str, str] = {}  # of each stream, the coordinates that its numbers depend on
_devices: list[torch.device] = []  # the accelerator, where there is one
_data = torch.Generator()


def _derived(seed: int, name: str, place: object = "") -> int:
    """Return a seed for something with a name; others for other names and places."""
    digest = hashlib.blake2b(f"{seed} {name} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int, mesh: NamedMesh) -> None:
    """Seed Python's and torch's random numbers, and NumPy's where it is imported, and prepare :func:`streams`.

    Default numbers differ along all axes of the mesh but tp.
    """
    own = _derived(seed, "default", {axis: mesh.rank(axis) for axis in mesh.layout if axis != "tp"})
    inside_experts: list[str] = [axis for axis in ("ep", "etp") if axis in mesh.coords] or ["tp"]
    for name, more in (("tensor", ["tp"]), ("expert", inside_experts)):
        _places[name] = f"{name} { {axis: mesh.rank(axis) for axis in more if axis in mesh.coords} }"
    samples = {axis: mesh.rank(axis) for axis in mesh.layout if axis not in {"pp", "cp", "tp"}}
    _data.manual_seed(_derived(seed, "data", samples))
    _devices[:] = [mesh.device] if mesh.device.type not in {"cpu", "meta"} else []
    random.seed(own)
    torch.manual_seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own % 2**32)


def data_generator() -> torch.Generator:
    """Return the generator of ``streams("data")``, equal over pp, cp and tp: ``DataLoader(..., generator=data_generator())``."""
    return _data


@contextmanager
def streams(name: str) -> Iterator[None]:
    """Draw numbers inside the block that differ between ranks in another way than the default ones, after :func:`seed_all`.

    - ``"tensor"`` differs over tp as well: for what tp cuts, such as dropout on the heads of attention;
    - ``"expert"`` differs over ep and etp as well: for what is inside experts;
    - ``"data"`` is the same over pp, cp and tp: for what is drawn for samples, on the CPU.

    A block is seeded by a number from the default generator of the CPU, and by the rank's place: what puts that generator back,
    such as ``torch.utils.checkpoint``, puts blocks back, too. Every rank of a tp group has to enter **equally many blocks**: one
    that enters more has other default numbers from then on. ``"data"`` has a generator of its own instead (in a loader's worker the
    worker's), as loaders draw at other moments on each rank. The compiler does not follow a block: enter one around what is compiled.
    """
    if name == "data":
        if get_worker_info() is not None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(_data.get_state())
            try:
                yield
            finally:
                _data.set_state(torch.get_rng_state())
        return
    if name not in _places:
        raise TrainingError(f"there is no stream {name!r}; seed_all() makes tensor, expert and data")
    seed = _derived(int(torch.randint(2**62, ())), "stream", _places[name])
    with torch.random.fork_rng(devices=_devices, device_type=_devices[0].type if _devices else "cuda"):
        # torch.manual_seed() writes down the stack where CUDA was not used yet, which takes a millisecond.
        torch.default_generator.manual_seed(seed)
        for device in _devices:
            torch.get_device_module(device).manual_seed(seed)
        yield


def random_state() -> dict[str, Any]:
    """Return the states of the default generators of Python, NumPy (where it is imported) and torch, and that of the data."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state(), "data": _data.get_state()}
    version, numbers, *rest = random.getstate()
    found["python"] = (version, torch.tensor(numbers), *rest)
    for device in _devices:
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return found


def axes_with_equal_state(name: str) -> tuple[str, ...]:
    """Return the axes along which :func:`seed_all` gives ranks the same state of a generator.

    Args:
        name: the key of the generator in :func:`random_state`.
    """
    return SAME_SAMPLE_AXES if name == "data" else ("tp",)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Let the generators go on from a state; those that are not here are left out."""
    setters: dict[str, Any] = {"cpu": torch.set_rng_state, "data": _data.set_state}
    setters["python"] = lambda state: random.setstate(
        (state[0], tuple(torch.as_tensor(state[1]).tolist()), *state[2:])
    )
    for device in _devices:
        setters[device.type] = partial(torch.get_device_module(device).set_rng_state, device=device)
    if "numpy" in sys.modules:
        setters["numpy"] = sys.modules["numpy"].random.set_state
    for name in setters.keys() & state.keys():
        setters[name](state[name])


def normal(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return the mean and the deviation of a parameter's first weights: 0 and 0.02, but 1 for norms and 0 for biases."""
    if parameter.ndim > 1:
        return 0.0, 0.02
    return (0.0 if name.endswith("bias") else 1.0), 0.0


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model as it was written, without torch's wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def shard_of(parameter: Tensor, mesh: NamedMesh | None) -> tuple[DeviceMesh, int, int] | None:
    """Return the mesh over which a plain tensor is cut, the dim and the number of blocks, by Megatron's marks."""
    marked = getattr(parameter, "tensor_model_parallel", False) and not isinstance(parameter, DTensor)
    if mesh is None or not marked:
        return None
    axis = "tp" if getattr(parameter, "allreduce", True) or "etp" not in mesh.coords else "etp"
    if axis not in mesh.coords or mesh.size(axis) == 1:
        return None
    return mesh[axis], getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)


@torch.no_grad()
def init_parameters(
    model: nn.Module, seed: int, *, distribution: Callable[[str, Tensor], tuple[float, float]] = normal
) -> None:
    """Fill a model's parameters with random numbers that depend on the seed and on each one's name only.

    Call it where the model is parallelized and sharded: each rank draws one whole parameter after the other, on the CPU in float32,
    and keeps its shard, as torch's ``distribute_tensor`` cuts it; marked shards of Megatron's over the tp (experts: etp) of the
    current mesh. A pipeline stage has the names of the whole model. Buffers are left alone. ``distribution`` gets the name and the
    parameter (of a DTensor, with the whole shape), and returns the mean and the deviation of a normal distribution.
    """
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise TrainingError(
            f"{listing(on_meta, 4)}: on the meta device; call model.to_empty(device=...) first"
        )
    for wrapped, parameter in model.named_parameters():
        name = plain_name(wrapped)
        mean, deviation = distribution(name, parameter)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if deviation == 0:
            local.fill_(mean)
            continue
        mesh = current_mesh() if getattr(parameter, "tensor_model_parallel", False) else None
        cut = shard_of(parameter, mesh)
        shape = list(parameter.shape)
        if cut is not None:
            ranks, dim, blocks = cut
            shape[dim] *= ranks.size()
        generator = torch.Generator().manual_seed(_derived(seed, name))
        whole = torch.empty(shape).normal_(mean, deviation, generator=generator)
        if isinstance(parameter, DTensor):  # nothing is sent
            places = parameter.device_mesh, parameter.placements
            whole = distribute_tensor(whole, *places, src_data_rank=None).to_local()
        elif cut is not None:
            by_rank = whole.unflatten(dim, (blocks, ranks.size(), -1))
            whole = by_rank.select(dim + 1, ranks.get_local_rank()).flatten(dim, dim + 1)
        local.copy_(whole)
