"""``namedmesh doctor``: the ranks of a job check every group of a layout by a collective, and measure each axis and host.

Rank 0 prints what all of them measured; what is wrong is an error on every rank.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh.errors import AgreementError, count_of, listing, ranks_in_words
from namedmesh.init import init_mesh
from namedmesh.plan.spec import UsageError, parse_spec, resolve
from namedmesh.plan.tables import Table, as_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

    from namedmesh.dialects import DialectLayout

_WARM, _ROUNDS = 3, 9


class Group(NamedTuple):
    """A group to check: its axis, the ranks that should be in it, and the group itself."""

    axis: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


def run_doctor(spec: str, keywords: Mapping[str, Any], arguments: Namespace) -> int:
    """Check a layout, a spec or the keywords of :func:`namedmesh.plan.make_plan`, on the ranks of this job; return the status."""
    problems = []
    for name in ("timeout", "megabytes"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e9:  # noqa: PLR2004  as torch can count seconds, and memory hold megabytes
            problems.append(f"{name} is {value:g}; it is a number above 0 and below 1e9")
    if problems:
        raise UsageError(*problems)
    if spec:
        parse_spec(spec)  # what cannot be read is said before the ranks look for each other
    timeout = timedelta(seconds=arguments.timeout)
    device = launch.init(arguments.device, backend=arguments.backend, timeout=timeout)
    try:
        arrangement = resolve(spec, world_size=dist.get_world_size(), **keywords)
        data = _check(
            arrangement, device, timeout, arguments.megabytes or (4 if device.type == "cpu" else 64)
        )
        if dist.get_rank() == 0:
            head = f"{arrangement.dense}, {dist.get_backend()} on {device.type}, {count_of(data['hosts'], 'host')}"
            text = json.dumps(data) if arguments.format == "json" else report_text(head, data)
            sys.stdout.write(f"{text}\n")
    finally:
        dist.destroy_process_group()
    return 0


def _check(
    arrangement: DialectLayout, device: torch.device, timeout: timedelta, megabytes: float
) -> dict[str, Any]:
    """Return what all ranks measured, once every group is right."""
    # A rank that waits for a stuck collective comes to the others after its own timeout.
    reports = dist.new_group(backend="gloo", timeout=3 * timeout)
    mesh = init_mesh(arrangement.dense, device=device.type)
    axes = dict.fromkeys(arrangement.dense)
    if arrangement.expert is not None:
        sizes: dict[str, Any] = dict(arrangement.expert.items())
        mesh.add_view("expert", **sizes)
        axes |= dict.fromkeys(arrangement.expert)
    groups = [Group(axis, mesh.ranks(axis), mesh.group(axis)) for axis in axes if mesh.size(axis) > 1]
    groups.append(Group("world", tuple(range(dist.get_world_size())), dist.group.WORLD))
    found = _gathered(check_groups(groups, dist.get_rank(), device, timeout), reports)
    if any(found):
        raise AgreementError(*problems_of(found))
    hosts = _gathered(socket.gethostname(), reports)
    report = {
        "local": _timed(_work_of(device), device),
        "axes": {group.axis: measure_group(group, device, megabytes) for group in groups},
        "links": _measure_links(hosts, device, megabytes),
    }
    each = _gathered(report, reports)
    mesh.close()
    return summary(each, hosts)


def _gathered(own: Any, group: dist.ProcessGroup) -> list[Any]:
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, own, group=group)
    return each


def problems_of(found: Sequence[tuple[str, str] | None]) -> list[str]:
    """Return the problems that ranks found, an axis and a sentence by rank, each once with all of its ranks."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, problem in enumerate(found):
        if problem:
            holders.setdefault(problem, []).append(rank)
    return [f"axis {axis}, {ranks_in_words(ranks)}: {problem}" for (axis, problem), ranks in holders.items()]


def check_groups(
    groups: Sequence[Group], rank: int, device: torch.device, timeout: timedelta
) -> tuple[str, str] | None:
    """Return the axis and the problem of the first group that has one; results of later ones would mean nothing."""
    for group in groups:
        try:
            problem = _problem(group, rank, device, timeout)
        except (RuntimeError, TimeoutError) as error:
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        if problem:
            return group.axis, problem
    return None


def _problem(group: Group, rank: int, device: torch.device, timeout: timedelta) -> str:
    """Return the problem of a group; empty if its ranks, and the sum over them, are right."""
    own = torch.tensor([rank], device=device)
    members = [torch.empty_like(own) for _ in range(dist.get_world_size(group.group))]
    _wait(dist.all_gather(members, own, group=group.group, async_op=True), timeout)
    ranks = tuple(int(member.item()) for member in members)
    if ranks != group.ranks:
        return f"its group has ranks {listing(ranks)} instead of {listing(group.ranks)}"
    total, expected = own + 1, sum(group.ranks) + len(group.ranks)
    _wait(dist.all_reduce(total, group=group.group, async_op=True), timeout)
    return (
        ""
        if int(total.item()) == expected
        else f"an all-reduce gave {int(total.item())} instead of {expected}"
    )


def _wait(work: Any, timeout: timedelta) -> None:
    """Wait for a collective by polling: its own timeout may abort the process."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a collective did not end within {timeout.total_seconds():g} s")
        time.sleep(0.001)
    work.wait()


def _work_of(device: torch.device) -> Callable[[], object]:
    """Return a matrix product, which needs no other rank: a slow rank is no slow link."""
    matrix = torch.ones((256, 256) if device.type == "cpu" else (4096, 4096), device=device)
    return lambda: matrix @ matrix


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that something takes on the device, the median of some rounds after the first ones."""
    times = []
    for _ in range(_WARM + _ROUNDS):
        start = time.perf_counter()
        action()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM:])


def measure_group(
    group: Group, device: torch.device, megabytes: float
) -> tuple[tuple[int, ...], float, float]:
    """Return the ranks of a group, the seconds of a small all-reduce, and the bus bandwidth of a large one.

    A ring sends 2 (n-1)/n of the bytes over each link; that is what counts, whatever the algorithm.
    """
    small, large = torch.zeros(1, device=device), torch.zeros(max(1, int(megabytes * 2**18)), device=device)
    latency = _timed(lambda: dist.all_reduce(small, group=group.group), device)
    seconds = _timed(lambda: dist.all_reduce(large, group=group.group), device)
    size = len(group.ranks)
    return group.ranks, latency, 2 * (size - 1) / size * large.numel() * 4 / seconds


def host_pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return one round of pairs of hosts, by the first rank of each; of an odd number the last meets the first.

    Example:
        >>> host_pairs(["a", "a", "b", "b", "c"])
        [(0, 2), (4, 0)]
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) == 1:
        return []
    return list(zip(firsts[::2], [*firsts[1::2], firsts[0]], strict=False))


def _measure_links(hosts: Sequence[str], device: torch.device, megabytes: float) -> dict[str, float]:
    """Return the bytes a second to the host that this rank's host is paired with, if it sends; communicates."""
    rank, speeds = dist.get_rank(), dict[str, float]()
    message, answer = (
        torch.zeros(max(1, int(megabytes * 2**18)), device=device),
        torch.zeros(1, device=device),
    )

    def ask(other: int) -> None:
        dist.send(message, other)
        dist.recv(answer, other)

    def reply(other: int) -> None:
        dist.recv(message, other)
        dist.send(answer, other)

    for first, second in host_pairs(hosts):
        if rank == first:
            seconds = _timed(partial(ask, second), device)
            speeds[f"{hosts[first]} - {hosts[second]}"] = message.numel() * 4 / seconds
        elif rank == second:
            _timed(partial(reply, first), device)
    return speeds


def summary(reports: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> dict[str, Any]:
    """Return what the ranks measured: a row for each axis, the pairs of hosts, the slowest rank."""
    axes = []
    for axis in reports[0]["axes"]:
        speeds = {tuple(report["axes"][axis][0]): report["axes"][axis][1:] for report in reports}
        slowest = min(speeds, key=lambda ranks: speeds[ranks][1])
        latency, bandwidth = (statistics.median(each) for each in zip(*speeds.values(), strict=True))
        row = {
            "axis": axis,
            "size": len(slowest),
            "groups": len(speeds),
            "latency us": round(latency * 1e6, 1),
        }
        row |= {"GB/s": round(bandwidth / 1e9, 3), "slowest group": listing(slowest)}
        axes.append(row | {"its GB/s": round(speeds[slowest][1] / 1e9, 3)})
    times = [report["local"] for report in reports]
    links = {pair: round(speed / 1e9, 3) for report in reports for pair, speed in report["links"].items()}
    slowest_rank, factor = times.index(max(times)), max(times) / statistics.median(times)
    return {
        "axes": axes,
        "links": links,
        "slowest_rank": slowest_rank,
        "slowest_factor": factor,
        "hosts": len(set(hosts)),
    }


def report_text(head: str, data: Mapping[str, Any]) -> str:
    """Write the summary for people."""
    columns = tuple(data["axes"][0])
    parts = [head, as_text(Table(columns, tuple(tuple(row.values()) for row in data["axes"])))]
    parts.append("every group has the right ranks and gives the right sum")
    if data["links"]:
        slowest = sorted(data["links"].items(), key=lambda each: each[1])[:8]
        lines = [f"{len(data['links'])} pairs of hosts, the slowest first:"]
        parts.append("\n".join([*lines, *(f"  {pair}: {speed} GB/s" for pair, speed in slowest)]))
    rank, factor = data["slowest_rank"], data["slowest_factor"]
    parts.append(f"slowest rank: {rank}, {factor:.2f} times the median for work of its own")
    return "\n\n".join(parts)
