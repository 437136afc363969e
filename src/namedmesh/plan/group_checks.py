"""The command ``doctor``: the ranks of a job check every group of a layout by a collective, and measure each axis and link.

Rank 0 writes what all of them measured as tables, or what is wrong as a list.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh.dialects import EXPERT
from namedmesh.errors import AgreementError, LayoutError, NamedMeshError, count_of, listing, ranks_in_words
from namedmesh.groups import agreed
from namedmesh.hosts import gloo_address, host_identity
from namedmesh.init import init_mesh
from namedmesh.options import normalized_backend
from namedmesh.plan.core import resolve
from namedmesh.plan.spec import UsageError, kept, parse_spec, raise_all
from namedmesh.plan.tables import Document, Table, Value, show

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

    from namedmesh.dialects import DialectLayout
    from namedmesh.mesh import NamedMesh

_LONGEST, _LARGEST = 1e9, 1e9  # seconds as torch can count them, and megabytes as memory can hold
_LEAVE_TIMEOUT = timedelta(seconds=10)
# A median of fewer pairs says nothing about one of them.
_FEWEST_TO_COMPARE = 3
_SHOWN = 8
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


class RankReport(NamedTuple):
    """What one rank measured."""

    host: str
    place: str  # the same for ranks that reach each other over the loopback interface, which are on one host
    card: str  # the network interface of its gloo groups, or their address
    local: float  # the seconds of a matrix product that needs no other rank
    axes: dict[str, Speed]  # of its group over each

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> RankReport:
        """Make a report of the JSON values that were made of one."""
        host, place, card, local, axes = data
        speeds = {axis: Speed(tuple(ranks), *speed) for axis, (ranks, *speed) in axes.items()}
        return cls(host, place, card, local, speeds)


def run_doctor(spec: str, keywords: Mapping[str, Any], arguments: Namespace) -> int:
    """Check a layout, a spec or the keywords of :func:`namedmesh.plan.make_plan`, on the ranks of this job; return the status."""
    _check_settings(spec, arguments)
    timeout = timedelta(seconds=arguments.timeout)
    try:
        here = launch.init(
            arguments.device, backend=arguments.backend, timeout=timeout, call="namedmesh doctor"
        )
    except AgreementError as error:
        raise AgreementError(f"{error}, or wait longer with --timeout") from None
    try:
        arrangement = resolve(spec, world_size=dist.get_world_size(), **keywords)
        megabytes = arguments.megabytes or (4 if here.type == "cpu" else 64)
        _check(arrangement, here, timeout, megabytes, arguments.format)
    except NamedMeshError:
        raise
    except RuntimeError as error:  # torch's, about a rank that ended or cannot be reached
        sys.stderr.write(
            f"namedmesh doctor: rank {dist.get_rank()} could not make its groups: {_first_line(error)}\n"
        )
        return 1
    finally:
        with suppress(RuntimeError, TimeoutError):  # the store ends with rank 0
            _wait(dist.barrier(async_op=True), _LEAVE_TIMEOUT)
        dist.destroy_process_group()
    return 0


def _check_settings(spec: str, arguments: Namespace) -> None:
    """Raise what is wrong whatever the number of ranks, for which the ranks need not find each other."""
    errors: list[NamedMeshError] = []
    problems = []
    for name, most in (("timeout", _LONGEST), ("megabytes", _LARGEST)):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < most:
            problems.append(f"{name} is {value:g}; it is a number above 0 and below {most:g}")
    try:
        normalized_backend(arguments.backend)
    except LayoutError as error:
        problems += error.problems
    if problems:
        errors.append(UsageError(*problems))
    with kept(errors):
        if spec:
            parse_spec(spec)
    raise_all(errors)


def _check(
    arrangement: DialectLayout, device: torch.device, timeout: timedelta, megabytes: float, form: str
) -> None:
    """Check the groups, show the report on rank 0, and raise the problems on every rank."""
    rank = dist.get_rank()
    mesh = init_mesh(arrangement.dense, device=device.type)
    headline = f"{mesh.layout}, {dist.get_backend()} on {device.type}"
    try:
        if arrangement.expert is not None:
            sizes: dict[str, Any] = dict(arrangement.expert.items())
            mesh.add_view(EXPERT, **sizes)
        reports, links = _measured(mesh, device, timeout, megabytes)
        if rank == 0:
            headline += f", {count_of(len({report.place for report in reports}), 'host')}"
            show(doctor_document(headline, reports, links), form)
    except AgreementError as error:
        if rank == 0:
            show(doctor_document(headline, problems=error.problems), form)
        raise
    finally:
        mesh.close()


def _measured(
    mesh: NamedMesh, device: torch.device, timeout: timedelta, megabytes: float
) -> tuple[list[RankReport], list[Speed]]:
    """Check and measure; return the reports of all ranks on rank 0, and the links; raise the problems on every rank."""
    rank, ranks = mesh.global_rank, mesh.layout.ranks
    groups = [Group(axis, mesh.ranks(axis), mesh.group(axis)) for axis in mesh.coords if mesh.size(axis) > 1]
    groups.append(Group("world", tuple(ranks), dist.group.WORLD))
    found = check_groups(groups, rank, device, timeout)
    # A rank that waits for a stuck collective comes after its own timeout.
    with agreed(mesh.pool, "the checks of namedmesh doctor", ranks, timeout=2 * timeout) as maker:
        maker.agreement.compare({"_found": json.dumps([rank, *found])}, _problems_in)
        if found[1]:  # a rank alone has nobody to agree with
            raise AgreementError(*problems_of({rank: found}))
        local = _measure_work(device)
        axes = {}
        for group in groups:
            try:
                axes[group.axis] = measure_group(group, device, megabytes)
            except RuntimeError as error:  # noqa: PERF203  the problem names its axis
                raise AgreementError(*problems_of({rank: (group.axis, _first_line(error))})) from None
        report = RankReport(socket.gethostname(), host_identity(), gloo_address(), local, axes)
        links = _measure_links(_hosts_of_ranks(report.place, device), rank, device, megabytes)
        texts = {rank: json.dumps(report)}
        maker.agreement.exchange("report", texts[rank], ranks, texts.__setitem__ if rank == 0 else None)
    return [RankReport.from_data(json.loads(text)) for _, text in sorted(texts.items())], links


def _problems_in(requests: Sequence[Mapping[str, str]]) -> list[str]:
    each = (json.loads(request["_found"]) for request in requests)
    return problems_of({rank: (axis, problem) for rank, axis, problem in each})


def problems_of(found: Mapping[int, tuple[str, str]]) -> list[str]:
    """Return the problems that ranks found, each once with its axis and all of its ranks."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, (axis, problem) in found.items():
        if problem:
            holders.setdefault((axis, problem), []).append(rank)
    return [f"axis {axis}, {ranks_in_words(ranks)}: {problem}" for (axis, problem), ranks in holders.items()]


# The checks.


def check_groups(groups: list[Group], rank: int, device: torch.device, timeout: timedelta) -> tuple[str, str]:
    """Return the axis and the problem of the first group that has one: results of later ones would mean nothing."""
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
        return _first_line(error)
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# The measurements.


def _measure_work(device: torch.device) -> float:
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
    synchronize = (
        torch.cpu.synchronize if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    )
    times = []
    for _ in range(_WARM + rounds):
        synchronize()
        start = time.perf_counter()
        action()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM:])


def _hosts_of_ranks(place: str, device: torch.device) -> list[int]:
    """Return a number for each rank that ranks of one host share, of which ``place`` is the text; communicates."""
    mine = torch.tensor([int.from_bytes(sha256(place.encode()).digest()[:7], "big")], device=device)
    places = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(places, mine)
    return [int(each.item()) for each in places]


def pairs_to_measure(hosts: Sequence[object]) -> list[list[tuple[int, int]]]:
    """Return pairs of ranks in rounds: no rank is in two pairs of one round.

    The first round has two ranks of each host. In the others the first ranks of all hosts meet each other once, as in a
    tournament, so that there are as many rounds as hosts.
    """
    by_host: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
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


def _measure_links(hosts: list[int], rank: int, device: torch.device, megabytes: float) -> list[Speed]:
    """Return the speed of links inside hosts and between them, on every rank, if there are several; communicates."""
    if len(set(hosts)) == 1:
        return []
    rounds = pairs_to_measure(hosts)
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


# The report.


def doctor_document(
    headline: str,
    reports: Sequence[RankReport] = (),
    links: Sequence[Speed] = (),
    problems: Sequence[str] = (),
) -> Document:
    """Write the reports of all ranks in their order, and the links between hosts; or the problems, where there are any."""
    hosts = _host_names(reports)
    rows = []
    for axis in reports[0].axes if reports else ():
        speeds = [report.axes[axis] for report in reports]
        rows.append(
            (axis, len(speeds[0].ranks), *_summary([(listing(speed.ranks), speed) for speed in speeds]))
        )
    table = Table(("axis", "size", "groups", "latency us", "GB/s", "slowest group", "its GB/s"), tuple(rows))
    named = [(" - ".join(dict.fromkeys(hosts[rank] for rank in link.ranks)), link) for link in links]
    between = [(name, link) for name, link in named if name not in hosts]
    kinds = {"inside a host": [each for each in named if each not in between], "between hosts": between}
    measured = Table(
        ("link", "pairs", "latency us", "GB/s", "slowest pair", "its GB/s"),
        tuple((kind, *_summary(found)) for kind, found in kinds.items() if found),
    )
    cards = {host: report.card for host, report in zip(hosts, reports, strict=True)}
    data: dict[str, Any] = {"problems": list(problems), "slowest_rank": None, "slowest_factor": 1.0}
    parts: list[str | Table] = [headline, "\n".join(f"wrong: {problem}" for problem in problems)]
    if reports:
        parts += [table, "every group has the right ranks and gives the right sum"]
        times = [report.local for report in reports]
        rank, factor = times.index(max(times)), max(times) / (statistics.median(times) or 1.0)
        if links:
            networks = ", ".join(f"{host} {card}" for host, card in cards.items())
            parts += [measured, *_slow_links(between), f"network of the gloo groups: {networks}"]
        parts.append(f"slowest rank: {rank}, {factor:.2f} times the median for work of its own")
        data |= {"slowest_rank": rank, "slowest_factor": factor}
    data |= {"axes": table.records(), "links": measured.records(), "cards": cards}
    return Document(tuple(parts), lambda: data, lambda: table)


def _host_names(reports: Sequence[RankReport]) -> list[str]:
    """Return the name of each rank's host, with a number where two hosts have the same one."""
    names = {report.place: report.host for report in reports}
    alike = [name for name, count in Counter(names.values()).items() if count > 1]
    for number, (place, name) in enumerate(names.items()):
        if name in alike:
            names[place] = f"{name} ({number})"
    return [names[report.place] for report in reports]


def _summary(named: Sequence[tuple[str, Speed]]) -> tuple[Value, ...]:
    """Return how many names there are, the median latency and bandwidth, and the slowest with its own."""
    by_name: dict[str, list[float]] = {}
    for name, speed in named:
        by_name.setdefault(name, []).append(speed.bandwidth)
    bandwidths = {name: statistics.median(each) for name, each in by_name.items()}
    latency = statistics.median(speed.latency for _, speed in named)
    slowest = min(bandwidths, key=bandwidths.__getitem__)
    whole, least = statistics.median(bandwidths.values()), bandwidths[slowest]
    return len(bandwidths), round(latency * 1e6, 1), round(whole / 1e9, 3), slowest, round(least / 1e9, 3)


def _slow_links(between: Sequence[tuple[str, Speed]]) -> list[str]:
    """Return a sentence for each pair of hosts whose link has less than half of the median bandwidth."""
    if len(between) < _FEWEST_TO_COMPARE:
        return []
    median = statistics.median(link.bandwidth for _, link in between)
    return [
        f"slow: {pair}, {link.bandwidth / median:.2f} of the median of {len(between)} pairs of hosts"
        for pair, link in sorted(between, key=lambda each: each[1].bandwidth)
        if link.bandwidth < median / 2
    ][:_SHOWN]
