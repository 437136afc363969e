"""Random numbers that differ between ranks where they should: torch's default generator, and blocks seeded from it and from a rank's place."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils.data import get_worker_info

from namedmesh.errors import TrainingError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from namedmesh.mesh import NamedMesh

_places: dict[
    str, str
] = {}  # of each name, the coordinates that its numbers depend on beside the default ones
_devices: list[torch.device] = []  # the accelerator, where there is one
_data = torch.Generator()


def derived_seed(seed: int, name: str, place: object = "") -> int:
    """Return a seed for something with a name; others for other names and places."""
    digest = hashlib.blake2b(f"{seed} {name} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int, mesh: NamedMesh, differ_over: Iterable[str] | None = None) -> None:
    """Seed Python's and torch's random numbers, and NumPy's where it is imported, and prepare :func:`streams`.

    Prevents: one seed for all ranks, with which every data-parallel rank drops the same units; or a seed by global
    rank, with which the ranks of a tensor-parallel group drop different units of the same activations.

    Args:
        seed: any int, the same on every rank.
        mesh: the mesh.
        differ_over: axes of the mesh and of its views along which default numbers differ; by default all axes of the mesh
            but tp. With ``("pp",)`` they are what Megatron's tracker makes: the same on all ranks of a stage.

    Raises:
        AxisError: a name that is no axis.
    """
    axes = [axis for axis in mesh.layout if axis != "tp"] if differ_over is None else list(differ_over)
    own = derived_seed(seed, "default", {axis: mesh.rank(axis) for axis in axes})
    inside_experts: list[str] = [axis for axis in ("ep", "etp") if axis in mesh.coords] or ["tp"]
    for name, more in (("tensor", ["tp"]), ("expert", inside_experts)):
        _places[name] = f"{name} { {axis: mesh.rank(axis) for axis in more if axis in mesh.coords} }"
    samples = {axis: mesh.rank(axis) for axis in mesh.layout if axis not in {"pp", "cp", "tp"}}
    _data.manual_seed(derived_seed(seed, "data", samples))
    _devices[:] = [mesh.device] if mesh.device.type not in {"cpu", "meta"} else []
    random.seed(own)
    torch.manual_seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own % 2**32)


def data_generator() -> torch.Generator:
    """Return the generator of ``streams("data")``, equal over pp, cp and tp: ``DataLoader(..., generator=data_generator())``.

    For loaders that shuffle, and for workers, whose default numbers depend on it.
    """
    return _data


def streams(name: str) -> AbstractContextManager[None]:
    """Draw numbers inside the block that differ between ranks in another way than the default ones, after :func:`seed_all`.

    - ``"tensor"`` differs over tp as well: for what tp cuts, such as dropout on the heads of attention;
    - ``"expert"`` differs over ep and etp as well: for what is inside experts;
    - ``"data"`` is the same over pp, cp and tp: for what is drawn for samples, on the CPU.

    Prevents: dropout with one mask on all ranks of a tensor-parallel group, each of which has other features.

    A block is seeded by a number from the default generator of the CPU, and by the rank's place: what puts that generator back,
    such as ``torch.utils.checkpoint``, puts blocks back, too. Every rank of a tp group has to enter **equally many blocks**: one
    that enters more has other default numbers from then on. ``"data"`` has a generator of its own instead (in a loader's worker the
    worker's), as loaders draw at other moments on each rank. The compiler does not follow a block: enter one around what is compiled.

    Raises:
        TrainingError: there is no such name, or :func:`seed_all` was not called.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(tp=1, device="cpu")
        >>> seed_all(1, mesh)
        >>> with streams("tensor"):
        ...     mask = torch.rand(4) > 0.5   # another one on each rank of tp
        >>> mesh.close(); dist.destroy_process_group()
    """
    if name == "data":
        return _from_data()
    if name not in _places:
        known = ("tensor", "expert", "data")
        raise TrainingError(
            f"there is no stream {name!r}{did_you_mean(name, known)}; seed_all() makes {', '.join(known)}"
        )
    return _from_default(_places[name])


@contextmanager
def _from_default(place: str) -> Iterator[None]:
    seed = derived_seed(int(torch.randint(2**62, ())), "stream", place)
    with torch.random.fork_rng(devices=_devices, device_type=_devices[0].type if _devices else "cuda"):
        # torch.manual_seed() writes down the stack where CUDA was not used yet, which takes a millisecond.
        torch.default_generator.manual_seed(seed)
        for device in _devices:
            torch.get_device_module(device).manual_seed(seed)
        yield


@contextmanager
def _from_data() -> Iterator[None]:
    if get_worker_info() is not None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(_data.get_state())
        try:
            yield
        finally:
            _data.set_state(torch.get_rng_state())


def random_state() -> dict[str, Tensor]:
    """Return the states of the default generators of Python, NumPy (where it is imported) and torch, and that of the data."""
    found = {"cpu": torch.get_rng_state(), "data": _data.get_state(), "python": _as_bytes(random.getstate())}
    for device in _devices:
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = _as_bytes((name, keys.tolist(), *rest))
    return found


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Let the generators go on from a state; those that are not here are left out."""
    for key, each in state.items():
        if key == "cpu":
            torch.set_rng_state(each)
        elif key == "data":
            _data.set_state(each)
        elif key == "python":
            version, numbers, gauss = json.loads(bytes(each.tolist()))
            random.setstate((version, tuple(numbers), gauss))
        elif key == "numpy" and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(json.loads(bytes(each.tolist()))))
        for device in _devices:
            if key == device.type:
                torch.get_device_module(device).set_rng_state(each, device)


def _as_bytes(state: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
