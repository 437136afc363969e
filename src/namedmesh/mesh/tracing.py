"""``trace``: the collectives of a step, by the axes of a mesh and by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import NamedTuple

import torch.distributed as dist
from torch.utils.module_tracker import ModuleTracker

from namedmesh._torch.groups import CollectiveMode
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh

# Parts of the names of torch's operators, without underscores: longer ones first.
_COLLECTIVES = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
}


class Call(NamedTuple):
    """One call of a collective, or of a send or receive, on this rank.

    Attributes:
        axes: the axes of the mesh whose group it is, such as ``"tp"`` or ``"dp, cp"``; ``"no axis"``
            for another group.
        phase: ``"forward"`` of a module, ``"backward"``, or ``"other"``: a loss, clipping, an optimizer.
        collective: such as ``"all-reduce"``.
        module: the innermost module that was running; its name starts with the class of the
            outermost one.
        num_bytes: the size of what the rank puts in, or of what it gets out if that is larger: the
            full tensor of an all-gather, a reduce-scatter or an all-reduce.
    """

    axes: str
    phase: str
    collective: str
    module: str
    num_bytes: int


class TraceReport:
    """The calls of a block under :func:`trace`; ``print(report)`` shows a table.

    Attributes:
        calls: the calls of this rank, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], list[Call]] = {}
        for call in self.calls:
            rows.setdefault((call.axes, call.phase, call.collective), []).append(call)
        lines = ["axes       phase     collective      calls          bytes  most of them from"]
        for (axes, phase, collective), calls in sorted(rows.items(), key=lambda row: row[0][0]):
            bytes_of_module: Counter[str] = Counter()
            for call in calls:
                bytes_of_module[call.module] += call.num_bytes
            largest = [f"{name} {size:,}" for name, size in bytes_of_module.most_common(3)]
            counts = f"{len(calls):6} {bytes_of_module.total():14,}"
            lines.append(f"{axes:10} {phase:9} {collective:14} {counts}  {', '.join(largest)}")
        return "\n".join(lines)


@contextmanager
def trace(mesh: NamedMesh) -> Iterator[TraceReport]:
    """Context manager that counts the collectives of a block. The first rank prints them.

    It sees every collective that torch dispatches in the block: of namedmesh, DTensor, FSDP2 and
    DDP, and calls of ``torch.distributed``. It does not see replayed CUDA graphs, or communication
    without torch (DeepEP, Transformer Engine). No value changes. Steps take longer: do not measure
    their time. torch runs compiled code eagerly in the block, and raises for ``fullgraph=True``.

    torch's ``ModuleTracker`` names the modules. In the backward it knows those whose inputs need
    gradients. A gradient by the input of a module, ``torch.autograd.grad(loss, x)``, raises in the
    block if ``x`` is a leaf: multiply it by 1 before.

    torch's ``CommDebugMode`` counts the same operators, but neither groups nor bytes.

    Does not communicate. Other ranks may send something else, such as another pipeline stage: look
    at their ``report``.

    Args:
        mesh: the mesh that gives names to groups. A group is recognized by its ranks.

    Yields:
        The report, which grows as the block runs.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.

    Example:
        >>> import namedmesh, torch
        >>> mesh = namedmesh.init_mesh(dp=1, device="cpu")
        >>> with namedmesh.trace(mesh) as report:
        ...     dist.all_reduce(torch.ones(3))
        axes       phase     collective      calls          bytes  most of them from
        one rank   other     all-reduce          1             12  no module 12
        >>> mesh.close(); dist.destroy_process_group()
    """
    mesh = require_named_mesh(mesh, "trace")
    axes_of_ranks = {frozenset([mesh.global_rank]): "one rank"}
    for view in (mesh.layout, *mesh.views.values()):
        axes = [axis for axis in view if view.size(axis) > 1]
        for count in range(1, len(axes) + 1):
            for names in combinations(axes, count):
                axes_of_ranks.setdefault(frozenset(mesh.ranks(*names)), ", ".join(names))
    report = TraceReport()

    def record(operator: str, group: dist.ProcessGroup, num_bytes: int) -> None:
        """Add a call to the report."""
        name = operator.replace("_", "")
        matches = [collective for part, collective in _COLLECTIVES.items() if part in name]
        over = axes_of_ranks.get(frozenset(dist.get_process_group_ranks(group)), "no axis")
        # The name of a module starts with the names of the modules around it.
        module = max(modules.parents - {"Global"}, key=lambda name: (name.count("."), name), default="")
        phase = "forward" if module else "other"
        if modules.is_bw:
            phase = "backward"
        report.calls.append(Call(over, phase, (matches or [name])[0], module or "no module", num_bytes))

    with ModuleTracker() as modules, CollectiveMode(record):
        yield report
    if mesh.global_rank == mesh.layout.ranks[0]:
        print(report)  # noqa: T201  it is meant to print
