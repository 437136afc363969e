"""The states of random generators in a checkpoint, by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from namedmesh.layout import Layout
from namedmesh.training.seeds import streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from namedmesh.mesh import NamedMesh

States = dict[str, bytes]


def random_states(mesh: NamedMesh | None) -> States:
    """Return the states of this rank's generators and streams, by name."""
    states = streams.state_dict()
    if mesh is not None and mesh.device.type not in states:
        states[mesh.device.type] = torch.get_device_module(mesh.device).get_rng_state(mesh.device)
    return {name: bytes(state.tolist()) for name, state in states.items()}


def shared_states(by_rank: Sequence[States]) -> list[States]:
    """Return the same states, those that are equal as one object: pickled once."""
    once: dict[bytes, bytes] = {}
    return [{name: once.setdefault(state, state) for name, state in states.items()} for states in by_rank]


def restore_random_states(
    mesh: NamedMesh | None, saved: tuple[dict[str, int], int] | None, by_rank: Sequence[States]
) -> None:
    """Set each generator to the state that it had on the ranks that this one stands for.

    These are the ranks with its coordinates on the axes that have the same size now. Where they had several
    states of a generator, none of them is this rank's, and the generator stays as the job seeded it.
    """
    now = {} if mesh is None else dict(mesh.layout.items())
    before = Layout(**saved[0]) if saved and saved[0] else None
    stood_for: Sequence[int] = range(len(by_rank))
    if mesh is not None and before is not None:
        same = {axis: mesh.coords[axis] for axis, size in before.items() if now.get(axis) == size}
        stood_for = before.where(**same)
    restored = streams.state_dict()
    for name in by_rank[0]:
        states = {by_rank[rank].get(name) for rank in stood_for}
        state = states.pop()
        if not states and state is not None:
            restored[name] = torch.tensor(list(state), dtype=torch.uint8)
    streams.load_state_dict(restored)
    if mesh is not None and mesh.device.type != "cpu" and mesh.device.type in restored:
        torch.get_device_module(mesh.device).set_rng_state(restored[mesh.device.type], mesh.device)
