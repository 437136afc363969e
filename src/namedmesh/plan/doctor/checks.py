"""What each rank does: a collective whose answer is known on every group, and how long collectives take."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh.errors import listing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from namedmesh.mesh import NamedMesh

__all__ = ["AxisReport", "Probe", "RankReport", "examine", "probes"]

WORLD = "world"
_WARM, _LATENCY_ROUNDS, _BANDWIDTH_ROUNDS, _LOCAL_ROUNDS = 3, 20, 5, 9


@dataclass(frozen=True)
class Probe:
    """A group to look at: its axis, the ranks that should be in it, and the group itself."""

    axis: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass
class AxisReport:
    """What one rank saw of one axis: seconds of a small all-reduce, bytes per second of a large one."""

    axis: str
    ranks: tuple[int, ...]
    problem: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0


@dataclass
class RankReport:
    """What one rank saw: its axes, and the seconds that a matrix product takes it without the others."""

    rank: int
    local: float = 0.0
    axes: list[AxisReport] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankReport:
        """Back from JSON values."""
        axes = [AxisReport(**{**axis, "ranks": tuple(axis["ranks"])}) for axis in data["axes"]]
        return cls(data["rank"], data["local"], axes)


def probes(mesh: NamedMesh) -> list[Probe]:
    """The groups of this rank that have more than one rank: each axis, of views too, and the world."""
    found = [Probe(axis, mesh.ranks(axis), mesh.group(axis)) for axis in mesh.coords if mesh.size(axis) > 1]
    return [*found, Probe(WORLD, tuple(mesh.layout.ranks), dist.group.WORLD)]


def examine(
    found: list[Probe],
    rank: int,
    device: torch.device,
    *,
    timeout: timedelta,
    megabytes: float,
    step: Callable[[str], None],
) -> RankReport:
    """Check and measure each group in turn; every rank of the mesh calls this, and it communicates.

    The first group that gives a wrong answer, or none in time, ends it: what follows would mean nothing.

    Args:
        found: the groups.
        rank: this rank.
        device: where the tensors are.
        timeout: how long a collective may take.
        megabytes: the size of the large all-reduce.
        step: called with a word before each thing that takes time.
    """
    report = RankReport(rank)
    for probe in found:
        step(f"checking {probe.axis}")
        report.axes.append(AxisReport(probe.axis, probe.ranks, _wrong(probe, rank, device, timeout)))
        if report.axes[-1].problem:
            return report
    step("timing this rank alone")
    report.local = statistics.median(_local(device))
    for probe, seen in zip(found, report.axes, strict=True):
        step(f"timing {probe.axis}")
        try:
            seen.latency, seen.bandwidth = _timed(probe, device, megabytes)
        except (RuntimeError, TimeoutError) as error:
            seen.problem = _first_line(error)
            return report
    return report


def _wrong(probe: Probe, rank: int, device: torch.device, timeout: timedelta) -> str:
    """What is wrong with a group; nothing if its ranks, and the sum over them, are as they should be."""
    try:
        mine = torch.tensor([rank], dtype=torch.int64, device=device)
        seen = [torch.empty_like(mine) for _ in range(dist.get_world_size(probe.group))]
        _finish(dist.all_gather(seen, mine, group=probe.group, async_op=True), timeout)
        members = tuple(int(one.item()) for one in seen)
        if members != probe.ranks:
            return f"its group has ranks {listing(members)} instead of {listing(probe.ranks)}"
        total = mine + 1
        _finish(dist.all_reduce(total, group=probe.group, async_op=True), timeout)
        expected = sum(probe.ranks) + len(probe.ranks)
        if int(total.item()) != expected:
            return f"an all-reduce gave {int(total.item())} instead of {expected}"
    except (RuntimeError, TimeoutError) as error:
        return _first_line(error)
    return ""


def _finish(work: Any, timeout: timedelta) -> None:
    """Wait for a collective without being at the mercy of its own timeout, which may abort the process."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.0
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a collective did not end within {timeout.total_seconds():g} s")
        time.sleep(pause)
        pause = 0.001
    work.wait()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _timed(probe: Probe, device: torch.device, megabytes: float) -> tuple[float, float]:
    """Seconds of a small all-reduce, and the bus bandwidth of a large one in bytes per second.

    A ring sends 2 (n-1)/n of the bytes over each link, so that is what is counted, whatever the algorithm.
    """
    small = torch.ones(1, device=device)
    large = torch.ones(max(1, int(megabytes * 2**20 / 4)), device=device)
    latency = statistics.median(_rounds(small, probe, device, _LATENCY_ROUNDS))
    seconds = statistics.median(_rounds(large, probe, device, _BANDWIDTH_ROUNDS))
    size = len(probe.ranks)
    return latency, 2 * (size - 1) / size * large.numel() * 4 / seconds


def _rounds(tensor: torch.Tensor, probe: Probe, device: torch.device, count: int) -> Iterator[float]:
    for number in range(_WARM + count):
        tensor.fill_(1)
        _synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(
            tensor, group=probe.group
        )  # it answered the check; looking again and again costs time
        _synchronize(device)
        if number >= _WARM:
            yield time.perf_counter() - start


def _local(device: torch.device) -> Iterator[float]:
    """Seconds of a matrix product that needs nobody else: it tells a slow rank from a slow link."""
    size = 256 if device.type == "cpu" else 4096
    matrix = torch.full((size, size), 1 / size, device=device)
    for number in range(_WARM + _LOCAL_ROUNDS):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        _synchronize(device)
        if number >= _WARM:
            yield time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
