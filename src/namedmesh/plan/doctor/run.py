"""Run the checks on each rank; write what all of them measured as tables, or what is wrong as a list, on rank 0."""

from __future__ import annotations

import json
import socket
import statistics
import sys
from contextlib import suppress
from datetime import timedelta
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
from namedmesh.plan.doctor.checks import (
    Group,
    Speed,
    check_groups,
    first_line,
    groups_to_check,
    hosts_of_ranks,
    measure_group,
    measure_links,
    measure_work,
    wait,
)
from namedmesh.plan.spec import UsageError
from namedmesh.plan.tables import Document, Table, Value, show

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from namedmesh.dialects import DialectLayout
    from namedmesh.mesh import NamedMesh

_LONGEST, _LARGEST = 1e9, 1e9  # seconds as torch can count them, and megabytes as memory can hold
_LEAVE_TIMEOUT = timedelta(seconds=10)
# A median of fewer pairs says nothing about one of them.
_FEWEST_TO_COMPARE = 3
_SHOWN = 8


def run_doctor(spec: str, keywords: Mapping[str, Any], arguments: Namespace) -> int:
    """Check a layout on the ranks of this job, and print one report; communicates.

    Args:
        spec: a spec string, or nothing.
        keywords: what :func:`namedmesh.plan.make_plan` takes instead.
        arguments: the other arguments of the command.

    Returns:
        On every rank 0 if all is well, or 1 if the groups could not be made.

    Raises:
        UsageError: all that is wrong with the numbers and the backend.
        LayoutError: the layout does not fit the world.
        LaunchError: the environment does not describe a job, its store cannot be reached, or the device is not
            there.
        AgreementError: ranks that did not come, or the problems that the checks found; the same on every rank.
    """
    _check_settings(arguments)
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
            f"namedmesh doctor: rank {dist.get_rank()} could not make its groups: {first_line(error)}\n"
        )
        return 1
    finally:
        with suppress(RuntimeError, TimeoutError):  # the store ends with rank 0
            wait(dist.barrier(async_op=True), _LEAVE_TIMEOUT)
        dist.destroy_process_group()
    return 0


def _check_settings(arguments: Namespace) -> None:
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
        raise UsageError(*problems)


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
    """Check and measure; return the reports of all ranks on rank 0, and the links between hosts.

    Raises:
        AgreementError: the problems that any rank found, on every rank.
    """
    rank, ranks, groups = mesh.global_rank, mesh.layout.ranks, groups_to_check(mesh)
    found = check_groups(groups, rank, device, timeout)
    # A rank that waits for a stuck collective comes after its own timeout.
    with agreed(mesh.pool, "the checks of namedmesh doctor", ranks, timeout=2 * timeout) as maker:
        maker.agreement.compare({"_found": json.dumps([rank, *found])}, _problems_in)
        if found[1]:  # a rank alone has nobody to agree with
            raise AgreementError(*problems_of({rank: found}))
        local = measure_work(device)
        axes = {group.axis: _speed(group, rank, device, megabytes) for group in groups}
        report = RankReport(socket.gethostname(), host_identity(), gloo_address(), local, axes)
        links = measure_links(hosts_of_ranks(report.place, device), rank, device, megabytes)
        texts = {rank: json.dumps(report)}
        maker.agreement.exchange("report", texts[rank], ranks, texts.__setitem__ if rank == 0 else None)
    return [RankReport.from_data(json.loads(text)) for _, text in sorted(texts.items())], links


def _speed(group: Group, rank: int, device: torch.device, megabytes: float) -> Speed:
    try:
        return measure_group(group, device, megabytes)
    except RuntimeError as error:
        raise AgreementError(*problems_of({rank: (group.axis, first_line(error))})) from None


def _problems_in(requests: Sequence[Mapping[str, str]]) -> list[str]:
    each = (json.loads(request["_found"]) for request in requests)
    return problems_of({rank: (axis, problem) for rank, axis, problem in each})


class RankReport(NamedTuple):
    """What one rank measured.

    Attributes:
        host: the name of its host.
        place: the same for ranks that reach each other over the loopback interface, which are on one host.
        card: the network interface of its gloo groups, or their address.
        local: the seconds of a matrix product that needs no other rank.
        axes: the speed of its group over each axis.
    """

    host: str
    place: str
    card: str
    local: float
    axes: dict[str, Speed]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> RankReport:
        """Make a report of the JSON values that were made of one."""
        host, place, card, local, axes = data
        speeds = {axis: Speed(tuple(ranks), *speed) for axis, (ranks, *speed) in axes.items()}
        return cls(host, place, card, local, speeds)


def problems_of(found: Mapping[int, tuple[str, str]]) -> list[str]:
    """Return the problems that ranks found, each once with its axis and all of its ranks."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, (axis, problem) in found.items():
        if problem:
            holders.setdefault((axis, problem), []).append(rank)
    return [f"axis {axis}, {ranks_in_words(ranks)}: {problem}" for (axis, problem), ranks in holders.items()]


def doctor_document(
    headline: str,
    reports: Sequence[RankReport] = (),
    links: Sequence[Speed] = (),
    problems: Sequence[str] = (),
) -> Document:
    """Write the reports of all ranks in their order, and the links between hosts; or the problems, where there are any."""
    hosts = _host_names(reports)
    axes = [(axis, [report.axes[axis] for report in reports]) for axis in reports[0].axes] if reports else []
    table = Table(
        ("axis", "size", "groups", "latency us", "GB/s", "slowest group", "its GB/s"),
        tuple(
            (axis, len(speeds[0].ranks), *_summary([(listing(speed.ranks), speed) for speed in speeds]))
            for axis, speeds in axes
        ),
    )
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
    data["axes"] = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    data["links"] = [dict(zip(measured.columns, row, strict=True)) for row in measured.rows]
    data["cards"] = cards
    return Document(tuple(parts), lambda: data, lambda: table)


def _host_names(reports: Sequence[RankReport]) -> list[str]:
    """Return the name of each rank's host, with a number where two hosts have the same one."""
    names = {report.place: report.host for report in reports}
    for number, (place, name) in enumerate(names.items()):
        if list(names.values()).count(name) > 1:
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
