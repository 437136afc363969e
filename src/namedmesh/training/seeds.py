"""Random numbers that differ between ranks where they should, and only there."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from namedmesh.errors import TrainingError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from namedmesh.mesh import NamedMesh

States = dict[str, "Tensor"]
"""The states of generators, by the type of their device."""


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
        self._generators: dict[str, dict[str, torch.Generator]] = {}
        self._inside: list[str] = []
        self._device: torch.device | None = None

    def __repr__(self) -> str:
        return f"Streams({', '.join(map(repr, self._generators))})"

    def reset(self, device: torch.device | None = None) -> None:
        """Forget all streams; those that follow are for the CPU and for this device."""
        self._check_outside("reset")
        self._generators = {}
        self._device = None if device is None or device.type in {"cpu", "meta"} else device

    def add(self, name: str, seed: int) -> None:
        """Add a stream, from a seed.

        Raises:
            TrainingError: there is a stream of this name.
        """
        if name in self._generators:
            raise TrainingError(
                f"there is a stream {name!r} already; choose another name, or reset() the streams first"
            )
        devices = [torch.device("cpu")] + ([] if self._device is None else [self._device])
        self._generators[name] = {each.type: torch.Generator(each).manual_seed(seed) for each in devices}

    def generator(self, name: str, device: str = "cpu") -> torch.Generator:
        """Return the generator of a stream, for what takes ``generator=``.

        Raises:
            TrainingError: there is no such stream.
        """
        self._check_name(name)
        return self._generators[name][device]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Draw from a stream inside the block.

        Raises:
            TrainingError: there is no such stream.
        """
        self._check_name(name)
        outside = self._default()
        if self._inside:
            self._keep(self._inside[-1])
        self._set_default(self._states_of(name))
        self._inside.append(name)
        try:
            yield
        finally:
            self._keep(self._inside.pop())
            self._set_default(self._states_of(self._inside[-1]) if self._inside else outside)

    def recomputed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=streams.recomputed)``.

        Prevents: a recomputation that draws other masks from the streams than the forward did, so that the
        gradients are of another function. torch puts back its own generators only.
        """
        kept: dict[str, States] = {}
        around: list[str] = []

        @contextmanager
        def forward() -> Iterator[None]:
            kept.update(self._states())
            around.extend(self._inside)
            yield

        @contextmanager
        def again() -> Iterator[None]:
            now, inside = self._states(), self._inside
            self._set(kept)
            self._inside = list(around)
            try:
                yield
            finally:
                self._set(now)
                self._inside = inside

        return forward(), again()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back every generator of torch's and of the streams behind the block, which may be inside a stream."""
        default, now = self._default(), self._states()
        try:
            yield
        finally:
            self._set_default(default)
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
        found = self._default() | {"python": _as_bytes(random.getstate())}
        if "numpy" in sys.modules:
            name, keys, *rest = sys.modules["numpy"].random.get_state()
            found["numpy"] = _as_bytes((name, keys.tolist(), *rest))
        for name, states in self._states().items():
            found |= {f"{name}/{kind}": state for kind, state in states.items()}
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state: streams that are in it are created, others stay as they are.

        Raises:
            TrainingError: called inside a stream.
        """
        self._check_outside("load_state_dict")
        for key, each in state.items():
            name, slash, kind = key.rpartition("/")
            if slash:
                generators = self._generators.setdefault(name, {})
                device = self._device if self._device is not None and self._device.type == kind else kind
                generators.setdefault(kind, torch.Generator(device)).set_state(each)
            elif key == "python":
                version, numbers, gauss = json.loads(bytes(each.tolist()))
                random.setstate((version, tuple(numbers), gauss))
            elif key == "numpy":
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.set_state(tuple(json.loads(bytes(each.tolist()))))
            else:
                self._set_default({key: each})

    def _check_name(self, name: str) -> None:
        if name not in self._generators:
            known = f"{did_you_mean(name, self._generators)}; the streams are {tuple(self._generators)}"
            raise TrainingError(
                f"there is no stream {name!r}{known}; seed_all() makes them, and streams.add(name, seed)"
            )

    def _check_outside(self, call: str) -> None:
        if self._inside:
            raise TrainingError(
                f"{call}() was called inside the stream {self._inside[-1]!r}; call it behind the with block"
            )

    def _states_of(self, name: str) -> States:
        return {kind: generator.get_state() for kind, generator in self._generators[name].items()}

    def _states(self) -> dict[str, States]:
        return {name: self._states_of(name) for name in self._generators}

    def _set(self, states: Mapping[str, States]) -> None:
        for name, kinds in states.items():
            for kind, state in kinds.items():
                self._generators[name][kind].set_state(state)

    def _keep(self, name: str) -> None:
        """Let a stream go on later where torch's default generators are."""
        for kind, state in self._default().items():
            if kind in self._generators[name]:
                self._generators[name][kind].set_state(state)

    def _default(self) -> States:
        states = {"cpu": torch.get_rng_state()}
        if self._device is not None:
            states[self._device.type] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

    def _set_default(self, states: States) -> None:
        for kind, state in states.items():
            if kind == "cpu":
                torch.set_rng_state(state)
            elif self._device is not None and self._device.type == kind:
                torch.get_device_module(kind).set_rng_state(state, self._device)


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
        >>> import torch, torch.distributed as dist
        >>> import namedmesh
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
