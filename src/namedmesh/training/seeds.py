"""Random numbers that differ between ranks where they should, and only there."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from namedmesh.errors import TrainingError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from namedmesh.mesh import NamedMesh


class _DefaultGenerator(NamedTuple):
    """An accelerator's, with what a ``torch.Generator`` has."""

    device: torch.device

    def get_state(self) -> Tensor:
        found: Tensor = torch.get_device_module(self.device).get_rng_state(self.device)
        return found

    def set_state(self, state: Tensor) -> None:
        torch.get_device_module(self.device).set_rng_state(state, self.device)


class Streams:
    """Named streams of random numbers, beside the default one: ``with training.streams("tensor"): ...``.

    Inside the block torch draws from the stream, on the CPU and on the accelerator; behind it, it goes on where it
    was before. Blocks may stand inside each other. :func:`seed_all` makes the streams ``"tensor"``, ``"expert"`` and
    ``"data"``. Each is a ``torch.Generator``, which :meth:`generator` returns.

    Prevents: dropout with one mask on all ranks of a tensor-parallel group, each of which has other features; and
    a default stream that ranks leave at different places, because some drew more than others.

    The compiler does not follow a switch of streams: enter one around what is compiled, not inside.

    Example:
        >>> import torch
        >>> from namedmesh.training.seeds import Streams
        >>> streams = Streams()
        >>> streams.add("mine", seed=1)
        >>> before = torch.get_rng_state()
        >>> with streams("mine"):
        ...     first = torch.rand(2)
        >>> with streams("mine"):
        ...     second = torch.rand(2)
        >>> both = torch.rand(4, generator=torch.Generator().manual_seed(1))
        >>> torch.equal(torch.cat([first, second]), both), torch.equal(torch.get_rng_state(), before)
        (True, True)
    """

    def __init__(self) -> None:
        self._inside: list[str] = []
        self.reset()

    def __repr__(self) -> str:
        return f"Streams({', '.join(map(repr, self._names()))})"

    def reset(self, device: torch.device | None = None) -> None:
        """Forget all streams; those that follow are for the CPU and for this device."""
        self._check_outside("reset")
        # torch's own by the type of their device, those of streams by "NAME/TYPE".
        self._generators: dict[str, Any] = {"cpu": torch.default_generator}
        if device is not None:
            self.follow(device)

    def follow(self, device: torch.device) -> None:
        """Save, load and put back the default generator of an accelerator, too."""
        if device.type != "meta":
            self._generators.setdefault(device.type, _DefaultGenerator(device))

    def add(self, name: str, seed: int) -> None:
        """Add a stream, from a seed.

        Raises:
            TrainingError: there is a stream of this name.
        """
        if name in self._names():
            raise TrainingError(
                f"there is a stream {name!r} already; choose another name, or reset() the streams first"
            )
        for kind in self._kinds():
            generator = torch.Generator(self._generators[kind].device)
            self._generators[f"{name}/{kind}"] = generator.manual_seed(seed)

    def generator(self, name: str, device: str = "cpu") -> torch.Generator:
        """Return the generator of a stream, for what takes ``generator=``.

        Raises:
            TrainingError: there is no such stream.
        """
        if name not in self._names():
            known = f"{did_you_mean(name, self._names())}; the streams are {self._names()}"
            raise TrainingError(
                f"there is no stream {name!r}{known}; seed_all() makes them, and streams.add(name, seed)"
            )
        found: torch.Generator = self._generators[f"{name}/{device}"]
        return found

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Draw from a stream inside the block.

        Raises:
            TrainingError: there is no such stream.
        """
        self.generator(name)
        own = [kind for kind in self._kinds() if f"{name}/{kind}" in self._generators]
        outside = {kind: self._generators[kind].get_state() for kind in own}
        self._switch([*self._inside, name], {})
        try:
            yield
        finally:
            self._switch(self._inside[:-1], outside)

    def recomputed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=streams.recomputed)``.

        Prevents: a recomputation that draws other masks from the streams than the forward did, so that the
        gradients are of another function. torch puts back its own generators only.
        """
        kept: dict[str, Tensor] = {}
        around: list[str] = []

        @contextmanager
        def forward() -> Iterator[None]:
            kept.update({key: state for key, state in self._states().items() if "/" in key})
            around.extend(self._inside)
            yield

        @contextmanager
        def again() -> Iterator[None]:
            inside = self._inside
            with self.unchanged():
                self._set(kept)
                self._inside = around
                try:
                    yield
                finally:
                    self._inside = inside

        return forward(), again()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back every generator of torch's and of the streams behind the block, which may be inside a stream."""
        now = self._states()
        try:
            yield
        finally:
            self._set(now)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of Python's, NumPy's and torch's default generators and of every stream, on the CPU.

        Returns:
            ``"cpu"`` (and the type of the accelerator) for torch's default generators, ``"python"``, ``"numpy"``
            where it is imported, ``"tensor/cpu"`` for a stream.

        Raises:
            TrainingError: called inside a stream.
        """
        self._check_outside("state_dict")
        found = self._states() | {"python": _as_bytes(random.getstate())}
        if "numpy" in sys.modules:
            name, keys, *rest = sys.modules["numpy"].random.get_state()
            found["numpy"] = _as_bytes((name, keys.tolist(), *rest))
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state: streams that are in it are created, others stay as they are, as do those of a device that is not here.

        Raises:
            TrainingError: called inside a stream.
        """
        self._check_outside("load_state_dict")
        for key, each in state.items():
            name, _, kind = key.rpartition("/")
            if key == "python":
                version, numbers, gauss = json.loads(bytes(each.tolist()))
                random.setstate((version, tuple(numbers), gauss))
            elif key == "numpy":
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.set_state(tuple(json.loads(bytes(each.tolist()))))
            elif kind in self._generators:
                if name:
                    self._generators.setdefault(key, torch.Generator(self._generators[kind].device))
                self._generators[key].set_state(each)

    def _kinds(self) -> list[str]:
        return [key for key in self._generators if "/" not in key]

    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.rpartition("/")[0] for key in self._generators if "/" in key))

    def _check_outside(self, call: str) -> None:
        if self._inside:
            raise TrainingError(
                f"{call}() was called inside the stream {self._inside[-1]!r}; call it behind the with block"
            )

    def _states(self) -> dict[str, Tensor]:
        return {key: generator.get_state() for key, generator in self._generators.items()}

    def _set(self, states: Mapping[str, Tensor]) -> None:
        for key, state in states.items():
            self._generators[key].set_state(state)

    def _switch(self, inside: list[str], outside: Mapping[str, Tensor]) -> None:
        """Let the stream that is drawn from go on later where torch's default generators are, and these where they were."""
        if self._inside:
            self._copy({f"{self._inside[-1]}/{kind}": kind for kind in self._kinds()})
        self._set(outside)
        if inside:
            self._copy({kind: f"{inside[-1]}/{kind}" for kind in self._kinds()})
        self._inside = inside

    def _copy(self, source_of: Mapping[str, str]) -> None:
        for key, source in source_of.items():
            if {key, source} <= self._generators.keys():
                self._generators[key].set_state(self._generators[source].get_state())


def _as_bytes(state: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


streams = Streams()
"""The streams of this process."""


def seed_all(seed: int, mesh: NamedMesh, differ_over: Iterable[str] | None = None) -> None:
    """Seed Python's and torch's random numbers, and NumPy's where it is imported, and make the named streams.

    Prevents: one seed for all ranks, with which every data-parallel rank drops the same units; or a seed by global
    rank, with which the ranks of a tensor-parallel group drop different units of the same activations, so that
    what they hold in common drifts apart.

    The numbers are the same on ranks with the same coordinates on the given axes. There are three streams beside:

    - ``streams("tensor")`` differs over tp as well: for what tp cuts, such as dropout on the heads of attention;
    - ``streams("expert")`` differs over ep and etp as well: for what is inside experts;
    - ``streams("data")`` is the same over pp, cp and tp: for the order of samples and what is drawn for them. A loader
      gets it with :func:`loader_kwargs`.

    With ``differ_over=("pp",)`` they guarantee what Megatron's tracker does: the default numbers are the same on all
    ranks of a stage, those of ``"tensor"`` differ over tp alone, and are the same over dp.

    Args:
        seed: any int.
        mesh: the mesh.
        differ_over: axes of the mesh and of its views; by default all axes of the mesh but tp.

    Raises:
        AxisError: a name that is no axis.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> training.seed_all(1, mesh)
        >>> default = torch.rand(1)
        >>> with training.streams("tensor"):
        ...     of_tensor = torch.rand(1)
        >>> training.seed_all(1, mesh)
        >>> bool(torch.rand(1) == default), bool(default == of_tensor)
        (True, False)
        >>> mesh.close(); dist.destroy_process_group()
    """
    axes = [axis for axis in mesh.layout if axis != "tp"] if differ_over is None else list(differ_over)
    place = {axis: mesh.rank(axis) for axis in axes}
    inside_experts: list[str] = [axis for axis in ("ep", "etp") if axis in mesh.coords] or ["tp"]
    streams.reset(mesh.device)
    for name, more in (("tensor", ["tp"]), ("expert", inside_experts)):
        further = {axis: mesh.rank(axis) for axis in more if axis in mesh.coords}
        streams.add(name, derived_seed(seed, name, place | further))
    samples = {axis: mesh.rank(axis) for axis in mesh.layout if axis not in {"pp", "cp", "tp"}}
    streams.add("data", derived_seed(seed, "data", samples))
    seed = derived_seed(seed, "default", place)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def derived_seed(seed: int, name: str, place: object = "") -> int:
    """Return a seed for something with a name; others for other names and places.

    Example:
        >>> derived_seed(1, "layer.weight") == derived_seed(1, "layer.weight") != derived_seed(2, "layer.weight")
        True
    """
    digest = hashlib.blake2b(f"{seed} {name} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
