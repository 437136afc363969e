"""Random numbers that differ between the right ranks, and initial weights of any layout."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.data import get_worker_info

from namedmesh._torch import is_capturing, make_rng_tracker
from namedmesh.arguments import named_mesh
from namedmesh.axes import EXPERT_MODEL_AXES, SAME_SAMPLE_AXES
from namedmesh.errors import TrainingError, format_items
from namedmesh.mesh import NamedMesh, current_mesh
from namedmesh.sharding import find_plain_shard, has_partition_dim, to_local

_places: dict[str, str] = {}  # of each stream, the coordinates that its numbers depend on
_devices: list[torch.device] = []  # the accelerator, where there is one
_data = torch.Generator("cpu")

# A matrix is drawn in tiles of 32 rows and 256 columns. Smaller tiles cost more for each number, as
# a generator is seeded for each tile. Of larger tiles, a rank with few rows or columns would draw
# many numbers that belong to other ranks.
_TILE_NUMBERS = 8192
_TILE_COLUMNS = 256
_TILE_ROWS = 32


def _derived(seed: int, name: str, place: object = "") -> int:
    """Return a seed for something with a name; others for other names and places."""
    digest = hashlib.blake2b(f"{seed} {name} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int, mesh: NamedMesh) -> None:
    """Seed Python, torch, and NumPy if it is imported, and prepare :func:`rng_stream`.

    Default numbers differ along all axes of the mesh except tp. On an accelerator, DTensor's random
    operations follow these seeds, too. It does not communicate.
    """
    mesh = named_mesh(mesh, "seed_all")
    equal = axes_with_equal_state("cpu")
    own = _derived(seed, "default", {axis: mesh.rank(axis) for axis in mesh.layout if axis not in equal})
    inside_experts = [axis for axis in EXPERT_MODEL_AXES if axis in mesh.coords] or ["tp"]
    for name, more in (("tensor", ["tp"]), ("expert", inside_experts)):
        _places[name] = f"{name} { {axis: mesh.rank(axis) for axis in more if axis in mesh.coords} }"
    equal = axes_with_equal_state("data")
    samples = {axis: mesh.rank(axis) for axis in mesh.layout if axis not in equal}
    _data.manual_seed(_derived(seed, "data", samples))
    _devices[:] = [mesh.device] if mesh.device.type not in {"cpu", "meta"} else []
    random.seed(own)
    torch.manual_seed(own)
    if _devices:
        make_rng_tracker(own, mesh[next(iter(mesh.layout))])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own % 2**32)


def data_generator() -> torch.Generator:
    """Return the generator of ``rng_stream("data")``, equal over pp, cp and tp: ``DataLoader(..., generator=data_generator())``."""
    return _data


@contextmanager
def rng_stream(name: str) -> Iterator[None]:
    """Draw numbers inside the block that differ along other axes than the default ones do.

    Call :func:`seed_all` before. Default numbers differ along all axes except tp. Numbers of the
    stream

    - ``"tensor"`` differ along tp as well: for dropout on what tp shards, such as heads;
    - ``"expert"`` differ along ep and etp as well: for dropout inside experts;
    - ``"data"`` are the same along pp, cp and tp: for what is drawn for samples, on the CPU.

    A block is seeded by a number from the default generator of the CPU, and by the rank's
    coordinates: what restores that generator, such as ``torch.utils.checkpoint``, restores the
    blocks, too. Every rank of a tp group has to enter **equally many blocks**: a rank that enters
    more has other default numbers from then on. ``"data"`` is seeded by a number from
    :func:`data_generator` instead, as loaders draw at other moments on each rank; in a loader's
    worker it is the worker's default generator. The compiler does not follow a block: enter one
    around what is compiled.

    Raises:
        TrainingError: the stream is unknown, or a CUDA graph is being captured.
    """
    if name == "data" and get_worker_info() is not None:
        yield
        return
    if name != "data" and name not in _places:
        raise TrainingError(f"there is no stream {name!r}; seed_all() makes tensor, expert and data")
    source = _data if name == "data" else torch.default_generator
    devices = [] if name == "data" else _devices
    if devices and is_capturing():
        raise TrainingError(
            f"rng_stream({name!r}) was entered while a CUDA graph is captured, which cannot seed "
            "generators and would replay the same numbers; capture only code without rng_stream, or "
            "do not capture this step"
        )
    # The source may move inside the block, so a draw seeds the block, and not a copy of its state.
    drawn = int(torch.randint(2**62, (), generator=source, device="cpu"))
    seed = _derived(drawn, "stream", _places.get(name, ""))
    with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
        # torch.manual_seed() writes down the stack where CUDA was not used yet, which takes a millisecond.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            module = torch.get_device_module(device)
            with module.device(device):  # the current device of a new thread is device 0
                module.manual_seed(seed)
        yield


def random_state() -> dict[str, Any]:
    """Return the states of the default generators of Python, NumPy (where it is imported) and torch, and that of the data."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state(), "data": _data.get_state()}
    version, numbers, *rest = random.getstate()
    found["python"] = (version, torch.tensor(numbers, device="cpu"), *rest)
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
        (state[0], tuple(torch.as_tensor(state[1], device="cpu").tolist()), *state[2:])
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


@torch.no_grad()
def init_parameters(
    model: nn.Module, seed: int, *, distribution: Callable[[str, Tensor], tuple[float, float]] = normal
) -> None:
    """Fill a model's parameters with random numbers that do not depend on the layout.

    Call it when the model is parallelized and sharded. Each number follows from the seed, the name
    of its parameter and its position in the full parameter: each rank draws its shards only, on the
    CPU in float32. Shards are those of DTensors, or plain tensors with Megatron's attributes, which
    are sharded over the tp axis (experts: etp) of the current mesh. A pipeline stage has the names
    of the whole model. Buffers are left alone. It does not communicate.

    Args:
        model: the model, on any device but meta.
        seed: the same on every rank.
        distribution: gets the name and the parameter (of a DTensor, with the full shape), and
            returns the mean and the standard deviation of a normal distribution.

    Raises:
        TrainingError: some parameters are on the meta device, or the seed is no integer.
    """
    if not isinstance(seed, SupportsIndex):  # such as the mesh, whose description has the layout
        raise TrainingError(
            f"seed of init_parameters must be an int, got {type(seed).__name__}; "
            "call init_parameters(model, seed=0)"
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise TrainingError(
            f"{format_items(on_meta, 4)}: on the meta device; call model.to_empty(device=...) first"
        )
    for wrapped, parameter in model.named_parameters():
        name = plain_name(wrapped)
        mean, deviation = distribution(name, parameter)
        local = to_local(parameter)
        if deviation == 0:
            local.fill_(mean)
        elif local.numel():
            values = torch.empty(local.shape or (1,), dtype=torch.float32, device="cpu")
            _fill_by_tiles(values, _dims_of(parameter), partial(_derived, seed, name))
            local.copy_(values.mul_(deviation).add_(mean).view(local.shape))


class _Dim(NamedTuple):
    """One dim of a parameter: its size in the full parameter, and this rank's indices."""

    size: int
    indices: Tensor


class _Run(NamedTuple):
    """Indices of a shard along one dim that follow each other in one tile."""

    tile: int
    in_tile: slice
    in_shard: slice


def _dims_of(parameter: Tensor) -> list[_Dim]:
    """Return the dims of a parameter; one without dims counts as a vector of one number."""
    dims = [_Dim(size, torch.arange(size, device="cpu")) for size in parameter.shape or [1]]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, size in enumerate(parameter.shape):
            # A vector along this dim, which torch shards as it shards the parameter. Not only Shard
            # has a dim: FSDP2 has a private kind of it, for dims that tp has sharded.
            shape = [1] * parameter.ndim
            shape[dim] = size
            vector = dims[dim].indices.view(shape)
            sharding = [
                placement if getattr(placement, "dim", None) == dim else Replicate()
                for placement in parameter.placements
            ]
            shard = distribute_tensor(vector, mesh, sharding, src_data_rank=None)
            dims[dim] = _Dim(size, shard.to_local().flatten().cpu())
        return dims
    # Only parameters with these attributes need a current mesh.
    plain = find_plain_shard(parameter, current_mesh()) if has_partition_dim(parameter) else None
    if plain is not None:
        ranks, dim, blocks = plain
        size = parameter.shape[dim] * ranks.size()
        by_rank = torch.arange(size, device="cpu").unflatten(0, (blocks, ranks.size(), -1))
        dims[dim] = _Dim(size, by_rank.select(1, ranks.get_local_rank()).flatten())
    return dims


def _fill_by_tiles(values: Tensor, dims: list[_Dim], seed_of: Callable[[object], int]) -> None:
    """Fill a shard with standard normal numbers.

    Every tile of the full tensor that overlaps the shard is drawn.

    Args:
        values: the shard, in float32 on the CPU.
        dims: the dims of the full tensor, and the indices of the shard.
        seed_of: returns the seed of a tile, from its number along each dim.
    """
    shape = _tile_shape([dim.size for dim in dims])
    runs_by_dim = [_runs(dim.indices, extent) for dim, extent in zip(dims, shape, strict=True)]
    numbers = torch.empty(shape, dtype=torch.float32, device="cpu")
    generator = torch.Generator("cpu")
    for runs in product(*runs_by_dim):
        # torch's CPU generator takes 32 bits of a seed: of millions of tiles, a few have a twin
        # elsewhere in the model.
        generator.manual_seed(seed_of([run.tile for run in runs]))
        numbers.normal_(generator=generator)
        values[tuple(run.in_shard for run in runs)] = numbers[tuple(run.in_tile for run in runs)]


def _tile_shape(shape: list[int]) -> list[int]:
    """Return the shape of the tiles of a tensor.

    For a matrix it is 32 rows and 256 columns, or more rows if the matrix has fewer columns. It
    does not depend on the size of dim 0, so rows that are added to a padded vocabulary leave the
    others as they are.
    """
    extents: list[int] = []
    numbers = 1
    for size in reversed(shape[1:]):
        limit = _TILE_ROWS if extents else _TILE_COLUMNS
        extents.insert(0, min(size, limit, _TILE_NUMBERS // numbers))
        numbers *= extents[0]
    return [_TILE_NUMBERS // numbers, *extents]


def _runs(indices: Tensor, extent: int) -> list[_Run]:
    """Split the indices of a shard along one dim into runs that lie in one tile each."""
    is_start = indices % extent == 0
    is_start[0] = True
    is_start[1:] |= indices.diff() != 1
    starts = is_start.nonzero().flatten()
    bounds = pairwise([*starts.tolist(), len(indices)])
    runs = []
    for index, (start, end) in zip(indices[starts].tolist(), bounds, strict=True):
        offset = index % extent
        runs.append(_Run(index // extent, slice(offset, offset + end - start), slice(start, end)))
    return runs
