"""Seeds that differ between the right ranks, and initial weights for any layout."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.utils.data import get_worker_info

from namedmesh._errors import TrainingError, format_items
from namedmesh._sharding import find_plain_shard, has_partition_dim, to_local
from namedmesh._torch.execution import is_capturing
from namedmesh._torch.modules import make_rng_tracker
from namedmesh.layout.axes import EXPERT_MODEL_AXES, SAME_SAMPLE_AXES
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh, current_mesh

# The part of a stream's seed that differs between ranks: by stream, its name and this rank's
# coordinates along the axes on which the stream depends.
_stream_keys: dict[str, str] = {}
# The accelerator that seed_all seeded; empty on a CPU.
_devices: list[torch.device] = []
_data_generator = torch.Generator("cpu")

# Initial weights are drawn in tiles. The tile of a matrix has 32 rows and 256 columns. Smaller tiles
# cost more per number, as a generator is seeded for each tile. With larger tiles, a rank with few
# rows or columns would draw many numbers that belong to other ranks.
_TILE_NUMBERS = 8192
_TILE_COLUMNS = 256
_TILE_ROWS = 32


def _derive_seed(seed: int, name: str, key: object = "") -> int:
    """Hash a seed, a name and a key to a new seed."""
    # All random values depend on this text, so another text, or another form of a dict in it, would
    # change the initial weights of every model.
    digest = hashlib.blake2b(f"{seed} {name} {key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _derive_default_seed(seed: int, name: str, mesh: NamedMesh, same_axes: Sequence[str]) -> int:
    """Return this rank's seed: equal along ``same_axes``, different along all other axes."""
    return _derive_seed(seed, name, {axis: mesh.rank(axis) for axis in mesh.layout if axis not in same_axes})


def seed_all(seed: int, mesh: NamedMesh) -> None:
    """Seed Python, NumPy if it is imported, and torch, and prepare :func:`rng_stream`.

    Random values of the default generators differ along every axis of the mesh except tp. On an
    accelerator, this also seeds DTensor's random operations. Does not communicate.

    Args:
        seed: the same on every rank.
        mesh: the mesh.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
    """
    mesh = require_named_mesh(mesh, "seed_all")
    local_seed = _derive_default_seed(seed, "default", mesh, find_axes_with_equal_state("cpu"))
    # "tensor" and "expert" differ along these axes, in addition to the axes of the default values.
    tensor_axes = [axis for axis in ("tp",) if axis in mesh.coords]
    expert_axes = [axis for axis in EXPERT_MODEL_AXES if axis in mesh.coords]
    for name, axes in (("tensor", tensor_axes), ("expert", expert_axes or tensor_axes)):
        _stream_keys[name] = f"{name} { {axis: mesh.rank(axis) for axis in axes} }"
    data_seed = _derive_default_seed(seed, "data", mesh, find_axes_with_equal_state("data"))
    _data_generator.manual_seed(data_seed)
    _devices.clear()
    if mesh.device.type not in {"cpu", "meta"}:
        _devices.append(mesh.device)
    random.seed(local_seed)
    torch.manual_seed(local_seed)
    if _devices:
        # torch would make the tracker in the first random operation on a DTensor, and then broadcast
        # the generator of rank 0.
        make_rng_tracker(local_seed, mesh[next(iter(mesh.layout))])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(local_seed % 2**32)


def data_generator() -> torch.Generator:
    """Return the generator of the "data" stream, whose state is the same along pp, cp and tp.

    Pass it to ``DataLoader(..., generator=data_generator())``, so that the ranks that must load the
    same samples shuffle them in the same order. :func:`seed_all` seeds it.
    """
    return _data_generator


@contextmanager
def rng_stream(name: str) -> Iterator[None]:
    """Draw random values from a named stream, instead of the default generators.

    Call :func:`seed_all` first. By default, random values differ along every axis except tp. The
    streams change that:

    ============ ========================= ============== ========================================
    name         differs along             same along     use it for
    ============ ========================= ============== ========================================
    ``"tensor"`` all axes, tp included                    dropout on tensors that are sharded over tp
    ``"expert"`` all axes, ep, etp or tp                  dropout inside experts
                 included
    ``"data"``   the data axes             pp, cp, tp     sampling and augmentation, on the CPU
    ============ ========================= ============== ========================================

    "tensor" and "expert" are seeded by a number that is drawn from the default CPU generator.
    Activation checkpointing restores this generator, and with it the values of the blocks. Every
    rank of a tp group must therefore enter **the same number of blocks**, otherwise their default
    generators diverge. "data" is seeded from :func:`data_generator` instead, because a data loader
    may draw at different moments on each rank. In a worker process of a DataLoader, "data" is the
    default generator, which torch seeds for each worker.

    torch.compile does not trace through a block: put the block around the compiled function.

    Args:
        name: ``"tensor"``, ``"expert"`` or ``"data"``.

    Raises:
        TrainingError: the stream is unknown, or a CUDA graph is being captured.
    """
    if name == "data" and get_worker_info() is not None:
        yield
        return
    if name != "data" and name not in _stream_keys:
        raise TrainingError(f"stream {name!r} does not exist; seed_all() creates tensor, expert and data")
    source = torch.default_generator
    devices = _devices
    if name == "data":
        source = _data_generator
        devices = []
    if devices and is_capturing():
        raise TrainingError(
            f"rng_stream({name!r}) was entered while a CUDA graph is captured, which cannot seed "
            "generators and would replay the same numbers; capture only code without rng_stream, "
            "or do not capture this step"
        )
    # The block is seeded by a drawn number instead of a copy of the source's state: code in the block
    # may draw from the source, too.
    drawn = int(torch.randint(2**62, (), generator=source, device="cpu"))
    seed = _derive_seed(drawn, "stream", _stream_keys.get(name, ""))
    with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
        # torch.manual_seed() would record a stack trace for CUDA's lazy initialization, which takes
        # about a millisecond.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            module = torch.get_device_module(device)
            # In a new thread, such as autograd's, the current device is device 0.
            with module.device(device):
                module.manual_seed(seed)
        yield


def collect_rng_states() -> dict[str, Any]:
    """Return this rank's states of the default generators and of :func:`data_generator`.

    Returns:
        The states by generator: ``"cpu"`` and the type of the accelerator for torch, ``"python"``,
        ``"numpy"`` if it is imported, and ``"data"``. All numbers are in tensors, as checkpoints
        need them.
    """
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "data": _data_generator.get_state()}
    version, numbers, *rest = random.getstate()
    states["python"] = (version, torch.tensor(numbers, device="cpu"), *rest)
    for device in _devices:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def find_axes_with_equal_state(name: str) -> tuple[str, ...]:
    """Return the axes along which :func:`seed_all` gives ranks the same state of a generator.

    Args:
        name: the key of the generator in :func:`collect_rng_states`.
    """
    return SAME_SAMPLE_AXES if name == "data" else ("tp",)


def restore_rng_states(state: Mapping[str, Any]) -> None:
    """Restore this rank's states of the default generators and of :func:`data_generator`.

    Args:
        state: states of :func:`collect_rng_states`, by name. Generators that are missing in it or
            in this process, such as the generator of an accelerator, are not changed.
    """
    setters: dict[str, Callable[[Any], object]] = {
        "cpu": torch.set_rng_state,
        "data": _data_generator.set_state,
        "python": _restore_python_state,
    }
    for device in _devices:
        setters[device.type] = partial(torch.get_device_module(device).set_rng_state, device=device)
    if "numpy" in sys.modules:
        setters["numpy"] = sys.modules["numpy"].random.set_state
    for name in setters.keys() & state.keys():
        setters[name](state[name])


def _restore_python_state(state: Any) -> None:
    # Python needs a tuple of ints. A state has a tensor, which checkpoints store more compactly.
    version, numbers, *rest = state
    random.setstate((version, tuple(torch.as_tensor(numbers, device="cpu").tolist()), *rest))


def default_distribution(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return the default mean and standard deviation of a parameter's initial values.

    Args:
        name: the name of the parameter.
        parameter: the parameter.

    Returns:
        The mean and the standard deviation: 0 and 0.02 for tensors of two or more dims, 0 and 0 for
        biases, and 1 and 0 for all other vectors, such as the weights of norms.
    """
    if parameter.ndim > 1:
        return 0.0, 0.02
    mean = 0.0 if name.endswith("bias") else 1.0
    return mean, 0.0


def strip_wrapper_names(name: str) -> str:
    """Remove from a parameter's name the prefixes of torch.compile and other wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@torch.no_grad()
def init_parameters(
    model: nn.Module,
    seed: int,
    *,
    distribution: Callable[[str, Tensor], tuple[float, float]] = default_distribution,
) -> None:
    """Fill a model's parameters with random values that do not depend on the layout.

    Call it after the model was parallelized and sharded. Each value depends on the seed, the name
    of the parameter and the position in the full parameter only, so each rank draws just its
    shards, on the CPU in float32. Local shards belong to DTensors, or to plain tensors with Megatron's
    attributes, which are sharded over the tp axis (experts: etp) of the current mesh. The
    parameters of a pipeline stage must have the names of the full model, as with :func:`stage_layers`.
    The real and the imaginary part of a complex value have half of the variance each, as in torch.
    Buffers are not changed. Does not communicate.

    Args:
        model: the model, on any device except meta.
        seed: the same on every rank.
        distribution: is called with the name and the parameter (a DTensor has its global shape) and
            returns the mean and the standard deviation of a normal distribution.

    Raises:
        TrainingError: some parameters are on the meta device, or the seed is not an int.
    """
    if not isinstance(seed, SupportsIndex):
        # The repr of a mesh, for example, would be taken as a seed. It depends on the layout.
        raise TrainingError(
            f"seed of init_parameters must be an int, got {type(seed).__name__}; "
            "call init_parameters(model, seed=0)"
        )
    problem = format_meta_problem(model)
    if problem:
        raise TrainingError(problem)
    for wrapped_name, param in model.named_parameters():
        name = strip_wrapper_names(wrapped_name)
        mean, deviation = distribution(name, param)
        local = to_local(param)
        if deviation == 0:
            local.fill_(mean)
        elif local.numel():
            dims = _find_dims(param)
            values = _draw_normal(local, dims, partial(_derive_seed, seed, name))
            if local.is_complex():
                imaginary = _draw_normal(local, dims, partial(_derive_seed, seed, f"{name} imaginary"))
                values = torch.complex(values, imaginary) / math.sqrt(2)
            local.copy_(values.mul_(deviation).add_(mean).view(local.shape))


def format_meta_problem(model: nn.Module) -> str:
    """Return the problem that a model is on the meta device, and how to initialize it.

    ``to_empty()`` also allocates the non-persistent buffers, such as the frequencies of rotary
    embeddings. No checkpoint and no :func:`init_parameters` fills them.

    Args:
        model: the model.

    Returns:
        The message; empty if no parameter is on the meta device.
    """
    on_meta = [name for name, param in model.named_parameters() if param.is_meta]
    if not on_meta:
        return ""
    problem = f"{format_items(on_meta, 4)}: on the meta device; call model.to_empty(device=...) first"
    saved = model.state_dict().keys()
    unsaved = [name for name, _ in model.named_buffers() if name not in saved]
    if unsaved:
        problem += (
            f", and then compute {format_items(unsaved, 8)} again: non-persistent buffers are in "
            "no checkpoint, and to_empty() leaves them uninitialized"
        )
    return problem


class _Dim(NamedTuple):
    """One dim of a parameter: its global size, and the global indices of the local shard."""

    size: int
    indices: Tensor


class _Run(NamedTuple):
    """Consecutive indices along one dim that are in one tile.

    Attributes:
        tile: the number of the tile along the dim.
        in_tile: the positions in the tile.
        in_shard: the positions in the local shard.
    """

    tile: int
    in_tile: slice
    in_shard: slice


def _find_dims(param: Tensor) -> list[_Dim]:
    """Return the dims of a parameter. A parameter without dims has one dim of size 1."""
    dims = [_Dim(size, torch.arange(size, device="cpu")) for size in param.shape or [1]]
    if isinstance(param, DTensor):
        for dim in range(param.ndim):
            dims[dim] = _find_dim_of_dtensor(param, dim)
        return dims
    # Only parameters with these attributes need a current mesh.
    plain = find_plain_shard(param, current_mesh()) if has_partition_dim(param) else None
    if plain is not None:
        ranks = plain.mesh.size()
        size = param.shape[plain.dim] * ranks
        # A fused parameter has several blocks along the dim, each of which is sharded.
        by_block_and_rank = torch.arange(size, device="cpu").unflatten(0, (plain.num_blocks, ranks, -1))
        local_indices = by_block_and_rank.select(1, plain.mesh.get_local_rank())
        dims[plain.dim] = _Dim(size, local_indices.flatten())
    return dims


def _find_dim_of_dtensor(param: DTensor, dim: int) -> _Dim:
    """Return the size and the local indices of one dim of a DTensor."""
    size = param.shape[dim]
    # torch shards a vector of indices along this dim as it shards the parameter. So no placement has
    # to be understood here. Shard is not the only one with a dim: FSDP2 has a private placement for
    # dims that tp has sharded already.
    shape = [1] * param.ndim
    shape[dim] = size
    indices = torch.arange(size, device="cpu").view(shape)
    placements: list[Placement] = []
    for placement in param.placements:
        shards_dim = getattr(placement, "dim", None) == dim
        placements.append(placement if shards_dim else Replicate())
    shard = distribute_tensor(indices, param.device_mesh, placements, src_data_rank=None)
    return _Dim(size, shard.to_local().flatten().cpu())


def _draw_normal(local: Tensor, dims: list[_Dim], seed_of_tile: Callable[[object], int]) -> Tensor:
    """Return standard normal numbers for a local shard, in float32 on the CPU."""
    values = torch.empty(local.shape or (1,), dtype=torch.float32, device="cpu")
    _fill_by_tiles(values, dims, seed_of_tile)
    return values


def _fill_by_tiles(values: Tensor, dims: list[_Dim], seed_of_tile: Callable[[object], int]) -> None:
    """Fill a shard with standard normal numbers.

    Every tile of the full tensor that overlaps with the shard is drawn.

    Args:
        values: the shard, in float32 on the CPU.
        dims: the dims of the full tensor, and the indices of the shard.
        seed_of_tile: returns the seed of a tile, from its number along each dim.
    """
    tile_shape = _choose_tile_shape([dim.size for dim in dims])
    runs_by_dim: list[list[_Run]] = []
    for dim, extent in zip(dims, tile_shape, strict=True):
        runs = _split_into_runs(dim.indices, extent)
        runs_by_dim.append(runs)
    tile = torch.empty(tile_shape, dtype=torch.float32, device="cpu")
    generator = torch.Generator("cpu")
    for runs_of_tile in product(*runs_by_dim):
        # torch's CPU generator uses 32 bits of a seed: among millions of tiles, a few are equal.
        generator.manual_seed(seed_of_tile([run.tile for run in runs_of_tile]))
        tile.normal_(generator=generator)
        in_tile = tuple([run.in_tile for run in runs_of_tile])
        in_shard = tuple([run.in_shard for run in runs_of_tile])
        values[in_shard] = tile[in_tile]


def _choose_tile_shape(shape: list[int]) -> list[int]:
    """Return the shape of the tiles of a tensor.

    A tile of a matrix has 32 rows and 256 columns, or more rows if the matrix has fewer columns.
    The shape does not depend on the size of dim 0, so rows that are added to pad a vocabulary do
    not change the other rows.
    """
    extents: list[int] = []
    num_elements = 1
    for size in reversed(shape[1:]):
        limit = _TILE_ROWS if extents else _TILE_COLUMNS
        extents.insert(0, min(size, limit, _TILE_NUMBERS // num_elements))
        num_elements *= extents[0]
    return [_TILE_NUMBERS // num_elements, *extents]


def _split_into_runs(indices: Tensor, extent: int) -> list[_Run]:
    """Split the indices of a shard along one dim into runs, each within one tile.

    Args:
        indices: the global indices, ascending within each block.
        extent: the size of a tile along the dim.
    """
    # A run starts at the first index of a tile, and after a gap.
    is_start = indices % extent == 0
    is_start[0] = True
    is_start[1:] |= indices.diff() != 1
    starts = is_start.nonzero().flatten()
    bounds = pairwise([*starts.tolist(), len(indices)])
    runs: list[_Run] = []
    for index, (start, end) in zip(indices[starts].tolist(), bounds, strict=True):
        offset = index % extent
        runs.append(_Run(index // extent, slice(offset, offset + end - start), slice(start, end)))
    return runs
