"""Measure the links between ranks of one host, and between hosts: each pair of hosts once, many pairs at a time."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.plan.doctor.checks import RankReport

_ROUNDS = 5


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

    Args:
        hosts: the host of each rank.

    Example:
        >>> pairs_to_measure({0: "a", 1: "a", 2: "b", 3: "c"})
        [[(0, 1)], [(2, 3)], [(0, 3)], [(0, 2)]]
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
    """Measure pairs of ranks over the default group; every rank calls this, and it communicates.

    Args:
        hosts: the host of each rank.
        rank: this one.
        device: where the messages are.
        megabytes: the size of a large one.

    Returns:
        The links whose first rank this is.
    """
    found = []
    small = torch.ones(1, device=device)
    large = torch.ones(max(1, int(megabytes * 2**20 / 4)), device=device)
    for pairs in pairs_to_measure(hosts):
        dist.barrier()
        for first, second in pairs:
            if rank == first:
                latency, seconds = _round_trip(small, small, second), _round_trip(large, small, second)
                # The answer to the large message is a small one.
                bandwidth = large.numel() * 4 / max(seconds - latency / 2, 1e-9)
                found.append(LinkReport((hosts[first], hosts[second]), latency / 2, bandwidth))
            elif rank == second:
                _answer(small, small, first)
                _answer(large, small, first)
    return found


def _round_trip(message: torch.Tensor, answer: torch.Tensor, other: int) -> float:
    """Return the seconds, the median of some rounds, until a message to another rank is answered."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        dist.send(message, other)
        dist.recv(answer, other)
        answer.item()  # on an accelerator the answer is awaited here
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _answer(message: torch.Tensor, answer: torch.Tensor, other: int) -> None:
    for _ in range(_ROUNDS):
        dist.recv(message, other)
        dist.send(answer, other)
