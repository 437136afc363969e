"""Write what all ranks measured as tables, or what is wrong as a list."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh.errors import listing, ranks_in_words
from namedmesh.plan.doctor.checks import Speed
from namedmesh.plan.tables import Document, Table, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# A median of fewer pairs says nothing about one of them.
_FEWEST_TO_COMPARE = 3
_SHOWN = 8


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
