"""Check every group of one rank by a collective with a known result; measure collectives, and links inside hosts and between."""

from __future__ import annotations

import statistics
import time
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from namedmesh.errors import listing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from namedmesh.mesh import NamedMesh

WORLD = "world"
_WARM, _LATENCY_ROUNDS, _BANDWIDTH_ROUNDS, _LOCAL_ROUNDS, _LINK_ROUNDS = 3, 20, 5, 9, 5


class Group(NamedTuple):
    """A group to check: its axis, the ranks that should be in it, and the group itself."""

    axis: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


class Speed(NamedTuple):
    """What some ranks measured: seconds of a small message or all-reduce, bytes per second of a large one."""

    ranks: tuple[int, ...]
    latency: float
    bandwidth: float


def groups_to_check(mesh: NamedMesh) -> list[Group]:
    """Return the groups of this rank that have more than one rank: each axis, of views too, and the world."""
    groups = [Group(axis, mesh.ranks(axis), mesh.group(axis)) for axis in mesh.coords if mesh.size(axis) > 1]
    return [*groups, Group(WORLD, tuple(mesh.layout.ranks), dist.group.WORLD)]


def check_groups(groups: list[Group], rank: int, device: torch.device, timeout: timedelta) -> tuple[str, str]:
    """Check each group in turn, and return the axis and the problem of the first that has one; communicates.

    It ends with that: results of later groups would mean nothing.
    """
    for group in groups:
        problem = _problem(group, rank, device, timeout)
        if problem:
            return group.axis, problem
    return "", ""


def _problem(group: Group, rank: int, device: torch.device, timeout: timedelta) -> str:
    """Return the problem of a group; empty if its ranks, and the sum over them, are right."""
    try:
        mine = torch.tensor([rank], dtype=torch.int64, device=device)
        members = [torch.empty_like(mine) for _ in range(dist.get_world_size(group.group))]
        wait(dist.all_gather(members, mine, group=group.group, async_op=True), timeout)
        ranks = tuple(int(member.item()) for member in members)
        if ranks != group.ranks:
            return f"its group has ranks {listing(ranks)} instead of {listing(group.ranks)}"
        total = mine + 1
        wait(dist.all_reduce(total, group=group.group, async_op=True), timeout)
        expected = sum(group.ranks) + len(group.ranks)
        if int(total.item()) != expected:
            return f"an all-reduce gave {int(total.item())} instead of {expected}"
    except (RuntimeError, TimeoutError) as error:
        return first_line(error)
    return ""


def wait(work: Any, timeout: timedelta) -> None:
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


def measure_work(device: torch.device) -> float:
    """Return the seconds of a matrix product, which needs no other rank: a slow rank is no slow link."""
    matrix = torch.ones((256, 256) if device.type == "cpu" else (4096, 4096), device=device)
    return _timed(lambda: torch.mm(matrix, matrix), device, _LOCAL_ROUNDS)


def measure_group(group: Group, device: torch.device, megabytes: float) -> Speed:
    """Measure a small all-reduce, and the bus bandwidth of a large one.

    A ring sends 2 (n-1)/n of the bytes over each link; that is what counts, whatever the algorithm.
    """
    small, large = _small_and_large(device, megabytes)
    latency = _timed(lambda: dist.all_reduce(small, group=group.group), device, _LATENCY_ROUNDS)
    seconds = _timed(lambda: dist.all_reduce(large, group=group.group), device, _BANDWIDTH_ROUNDS)
    size = len(group.ranks)
    return Speed(group.ranks, latency, 2 * (size - 1) / size * large.numel() * 4 / seconds)


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


def hosts_of_ranks(place: str, device: torch.device) -> list[int]:
    """Return a number for each rank that ranks of one host share, of which ``place`` is the text; communicates."""
    mine = torch.tensor([int.from_bytes(sha256(place.encode()).digest()[:7], "big")], device=device)
    places = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(places, mine)
    return [int(each.item()) for each in places]


def pairs_to_measure(hosts: Mapping[int, Any]) -> list[list[tuple[int, int]]]:
    """Return pairs of ranks in rounds: no rank is in two pairs of one round.

    The first round has two ranks of each host. In the others the first ranks of all hosts meet each other once, as in a
    tournament, so that there are as many rounds as hosts.
    """
    by_host: dict[Any, list[int]] = {}
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


def measure_links(hosts: list[int], rank: int, device: torch.device, megabytes: float) -> list[Speed]:
    """Measure links inside hosts and between them over the default group, if there are several; communicates.

    Every rank calls this with the host of each, and gets all links.
    """
    if len(set(hosts)) == 1:
        return []
    rounds = pairs_to_measure(dict(enumerate(hosts)))
    small, large = _small_and_large(device, megabytes)
    links = [pair for pairs in rounds for pair in pairs]
    measured = torch.zeros((len(links), 2), device=device)
    for pairs in rounds:
        dist.barrier()
        for first, second in pairs:
            if rank == first:
                latency = _timed(partial(_ask, small, small, second), device, _LINK_ROUNDS) / 2
                seconds = _timed(partial(_ask, large, small, second), device, _LINK_ROUNDS)
                # The answer to the large message is a small one.
                bandwidth = large.numel() * 4 / max(seconds - latency, 1e-9)
                measured[links.index((first, second))] = torch.tensor((latency, bandwidth))
            elif rank == second:
                for message in (small, large):
                    _timed(partial(_answer, message, small, first), device, _LINK_ROUNDS)
    dist.all_reduce(measured)  # of each, one rank has more than zeros
    return [Speed(link, *speed) for link, speed in zip(links, measured.tolist(), strict=True)]


def _ask(message: torch.Tensor, answer: torch.Tensor, other: int) -> None:
    dist.send(message, other)
    dist.recv(answer, other)


def _answer(message: torch.Tensor, answer: torch.Tensor, other: int) -> None:
    dist.recv(message, other)
    dist.send(answer, other)
