"""Check every group of one rank by a collective with a known result; measure collectives, and links inside hosts and between."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from namedmesh.errors import listing
from namedmesh.hosts import gloo_address, host_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from namedmesh.mesh import NamedMesh

WORLD = "world"
_WARM, _LATENCY_ROUNDS, _BANDWIDTH_ROUNDS, _LOCAL_ROUNDS, _LINK_ROUNDS = 3, 20, 5, 9, 5


class Group(NamedTuple):
    """A group to check: its axis, the ranks that should be in it, and the group itself."""

    axis: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass
class AxisReport:
    """The result of one rank on one axis: seconds of a small all-reduce, bytes per second of a large one."""

    axis: str
    ranks: tuple[int, ...]
    problem: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0


@dataclass
class RankReport:
    """The results of one rank.

    Attributes:
        rank: the rank.
        host: the name of its host.
        place: the same for ranks that reach each other over the loopback interface, which are on one host.
        card: the network interface of its gloo groups, or their address.
        local: the seconds of a matrix product that needs no other rank.
        axes: its groups.
    """

    rank: int
    host: str = ""
    place: str = ""
    card: str = ""
    local: float = 0.0
    axes: list[AxisReport] = field(default_factory=list)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankReport:
        """Make a report of the JSON values that ``asdict`` made of one."""
        axes = [AxisReport(**{**axis, "ranks": tuple(axis["ranks"])}) for axis in data["axes"]]
        return cls(**{**data, "axes": axes})


def groups_to_check(mesh: NamedMesh) -> list[Group]:
    """Return the groups of this rank that have more than one rank: each axis, of views too, and the world."""
    groups = [Group(axis, mesh.ranks(axis), mesh.group(axis)) for axis in mesh.coords if mesh.size(axis) > 1]
    return [*groups, Group(WORLD, tuple(mesh.layout.ranks), dist.group.WORLD)]


def check_groups(
    groups: list[Group], rank: int, device: torch.device, *, timeout: timedelta, megabytes: float
) -> RankReport:
    """Check and measure each group in turn; every rank of the mesh calls this, and it communicates.

    The first group that gives a wrong result, or none within ``timeout``, ends it: later results would mean nothing. The large
    all-reduce has ``megabytes``.
    """
    report = RankReport(rank, socket.gethostname(), host_identity(), gloo_address())
    for group in groups:
        report.axes.append(AxisReport(group.axis, group.ranks, _problem(group, rank, device, timeout)))
        if report.axes[-1].problem:
            return report
    # A matrix product needs no other rank: it distinguishes a slow rank from a slow link.
    matrix = torch.ones((256, 256) if device.type == "cpu" else (4096, 4096), device=device)
    report.local = _timed(lambda: torch.mm(matrix, matrix), device, _LOCAL_ROUNDS)
    for group, axis in zip(groups, report.axes, strict=True):
        try:
            axis.latency, axis.bandwidth = _measure(group, device, megabytes)
        except (RuntimeError, TimeoutError) as error:  # noqa: PERF203  what fails ends it
            axis.problem = first_line(error)
            return report
    return report


def _problem(group: Group, rank: int, device: torch.device, timeout: timedelta) -> str:
    """Return the problem of a group; empty if its ranks, and the sum over them, are right."""
    try:
        mine = torch.tensor([rank], dtype=torch.int64, device=device)
        members = [torch.empty_like(mine) for _ in range(dist.get_world_size(group.group))]
        _wait(dist.all_gather(members, mine, group=group.group, async_op=True), timeout)
        ranks = tuple(int(member.item()) for member in members)
        if ranks != group.ranks:
            return f"its group has ranks {listing(ranks)} instead of {listing(group.ranks)}"
        total = mine + 1
        _wait(dist.all_reduce(total, group=group.group, async_op=True), timeout)
        expected = sum(group.ranks) + len(group.ranks)
        if int(total.item()) != expected:
            return f"an all-reduce gave {int(total.item())} instead of {expected}"
    except (RuntimeError, TimeoutError) as error:
        return first_line(error)
    return ""


def _wait(work: Any, timeout: timedelta) -> None:
    """Wait for a collective by polling: its own timeout may abort the process."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.0
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a collective did not end within {timeout.total_seconds():g} s")
        time.sleep(pause)
        pause = 0.001
    work.wait()


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _measure(group: Group, device: torch.device, megabytes: float) -> tuple[float, float]:
    """Return the seconds of a small all-reduce, and the bus bandwidth of a large one in bytes per second.

    A ring sends 2 (n-1)/n of the bytes over each link; that is what counts, whatever the algorithm.
    """
    small, large = _small_and_large(device, megabytes)
    latency = _timed(lambda: dist.all_reduce(small, group=group.group), device, _LATENCY_ROUNDS)
    seconds = _timed(lambda: dist.all_reduce(large, group=group.group), device, _BANDWIDTH_ROUNDS)
    size = len(group.ranks)
    return latency, 2 * (size - 1) / size * large.numel() * 4 / seconds


def _small_and_large(device: torch.device, megabytes: float) -> tuple[torch.Tensor, torch.Tensor]:
    large = torch.zeros(max(1, int(megabytes * 2**20 / 4)), device=device)  # zero, however often it is summed
    return torch.zeros(1, device=device), large


def _timed(action: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the seconds that something takes on the device, the median of some rounds after the first ones."""
    times = []
    for _ in range(_WARM + rounds):
        _synchronize(device)
        start = time.perf_counter()
        action()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class LinkReport:
    """The link between two ranks: their hosts, seconds of a small message, bytes per second of a large one."""

    hosts: Sequence[str]
    latency: float
    bandwidth: float

    @property
    def crosses(self) -> bool:
        """Whether the ranks are on two hosts."""
        return self.hosts[0] != self.hosts[1]


def pairs_to_measure(hosts: Mapping[int, str]) -> list[list[tuple[int, int]]]:
    """Return pairs of ranks in rounds: no rank is in two pairs of one round.

    The first round has two ranks of each host. In the others the first ranks of all hosts meet each other once, as in a
    tournament, so that there are as many rounds as hosts.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        by_host.setdefault(host, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in by_host.values() if len(ranks) > 1]
    firsts: list[int | None] = [ranks[0] for ranks in by_host.values()]
    if len(firsts) % 2:
        firsts.append(None)  # whoever meets it pauses
    rounds = [inside]
    for _ in range(len(firsts) - 1):
        meeting = zip(firsts[: len(firsts) // 2], reversed(firsts[len(firsts) // 2 :]), strict=True)
        rounds.append([(a, b) for a, b in meeting if a is not None and b is not None])
        firsts = [firsts[0], firsts[-1], *firsts[1:-1]]
    return rounds


def hosts_to_measure(reports: Mapping[int, RankReport | None]) -> list[str]:
    """Return the name of each rank's host, which no other host has; none where there is one, or a rank has a problem."""
    present = [report for report in reports.values() if report is not None]
    names = {report.place: report.host for report in present}
    if (
        len(names) == 1
        or len(present) < len(reports)
        or any(axis.problem for each in present for axis in each.axes)
    ):
        return []
    for number, (place, name) in enumerate(names.items()):
        if list(names.values()).count(name) > 1:
            names[place] = f"{name} ({number})"
    return [names[report.place] for report in present]


def measure_links(
    hosts: Mapping[int, str], rank: int, device: torch.device, megabytes: float
) -> list[LinkReport]:
    """Measure pairs of ranks over the default group, and return the links whose first rank this is.

    Every rank calls this with the host of each, and it communicates; a large message has ``megabytes``.
    """
    found = []
    small, large = _small_and_large(device, megabytes)
    for pairs in pairs_to_measure(hosts):
        dist.barrier()
        for first, second in pairs:
            if rank == first:
                latency = _timed(partial(_ask, small, small, second), device, _LINK_ROUNDS)
                seconds = _timed(partial(_ask, large, small, second), device, _LINK_ROUNDS)
                # The answer to the large message is a small one.
                bandwidth = large.numel() * 4 / max(seconds - latency / 2, 1e-9)
                found.append(LinkReport((hosts[first], hosts[second]), latency / 2, bandwidth))
            elif rank == second:
                for message in (small, large):
                    _timed(partial(_answer, message, small, first), device, _LINK_ROUNDS)
    return found


def _ask(message: torch.Tensor, answer: torch.Tensor, other: int) -> None:
    dist.send(message, other)
    dist.recv(answer, other)


def _answer(message: torch.Tensor, answer: torch.Tensor, other: int) -> None:
    dist.recv(message, other)
    dist.send(answer, other)
