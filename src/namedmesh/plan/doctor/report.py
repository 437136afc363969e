"""Summarize the reports of all ranks as one table and a list of problems."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from namedmesh.errors import listing, ranks_in_words
from namedmesh.plan.tables import Document, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.plan.doctor.checks import AxisReport, RankReport
    from namedmesh.plan.doctor.links import LinkReport


# A median of fewer pairs says nothing about one of them.
_FEWEST_TO_COMPARE = 3
_SHOWN = 8


@dataclass(frozen=True)
class AxisSummary:
    """One axis over all ranks: seconds and bytes per second, the median and the slowest group."""

    axis: str
    size: int
    groups: int
    latency: float
    bandwidth: float
    slowest_group: tuple[int, ...]
    slowest_bandwidth: float


@dataclass(frozen=True)
class Summary:
    """The results of all ranks.

    Args:
        axes: the axes that were measured; empty if there is a problem.
        slowest_rank: the rank whose own matrix product took longest.
        slowest_factor: its time over the median.
        problems: a sentence for each problem, with the axis and the ranks.
        links: the links inside hosts and between them; empty on one host.
        cards: the network interface of each host, by its name.
    """

    axes: tuple[AxisSummary, ...]
    slowest_rank: int | None
    slowest_factor: float
    problems: tuple[str, ...]
    links: tuple[LinkReport, ...] = ()
    cards: Mapping[str, str] = field(default_factory=dict)


def summarize(reports: Mapping[int, RankReport | None], links: Sequence[LinkReport] = ()) -> Summary:
    """Summarize the reports of all ranks, and the links between them; None stands for a rank that did not report."""
    present = [report for report in reports.values() if report is not None]
    silent = [rank for rank, report in reports.items() if report is None]
    problems = _problems(present)
    if silent:
        problems.append(f"{ranks_in_words(silent)} stopped answering in the middle of the checks")
    if problems or not present:
        return Summary((), None, 1.0, tuple(problems))
    names = [axis.axis for axis in present[0].axes]
    columns = list(zip(*(report.axes for report in present), strict=True))
    slowest = max(present, key=lambda report: report.local)
    median = statistics.median(report.local for report in present)
    return Summary(
        tuple(_summary(name, column) for name, column in zip(names, columns, strict=True)),
        slowest.rank,
        slowest.local / median if median else 1.0,
        (),
        tuple(links),
        {report.host: report.card for report in present},
    )


def _problems(present: Sequence[RankReport]) -> list[str]:
    """Return the problems by axis, each once for all ranks that have it."""
    holders: dict[tuple[str, str], list[int]] = {}
    for report in present:
        for axis in report.axes:
            if axis.problem:
                holders.setdefault((axis.axis, axis.problem), []).append(report.rank)
    return [f"axis {axis}, {ranks_in_words(ranks)}: {problem}" for (axis, problem), ranks in holders.items()]


def _summary(name: str, column: Sequence[AxisReport]) -> AxisSummary:
    by_group: dict[tuple[int, ...], list[AxisReport]] = {}
    for report in column:
        by_group.setdefault(report.ranks, []).append(report)
    bandwidths = {
        group: statistics.median(report.bandwidth for report in reports)
        for group, reports in by_group.items()
    }
    slowest = min(bandwidths, key=lambda group: bandwidths[group])
    return AxisSummary(
        name,
        len(slowest),
        len(by_group),
        statistics.median(report.latency for report in column),
        statistics.median(bandwidths.values()),
        slowest,
        bandwidths[slowest],
    )


def doctor_document(summary: Summary, headline: str) -> Document:
    """Write a summary as text and as a table."""
    columns = ("axis", "size", "groups", "latency us", "GB/s", "slowest group", "its GB/s")
    rows = tuple(
        (
            axis.axis,
            axis.size,
            axis.groups,
            round(axis.latency * 1e6, 1),
            round(axis.bandwidth / 1e9, 3),
            listing(axis.slowest_group),
            round(axis.slowest_bandwidth / 1e9, 3),
        )
        for axis in summary.axes
    )
    table = Table(columns, rows)
    parts: list[str | Table] = [headline]
    if summary.problems:
        parts.append("\n".join(f"wrong: {problem}" for problem in summary.problems))
    else:
        parts += [table, "every group has the right ranks and gives the right sum"]
    links = _links_table(summary.links)
    if links.rows:
        cards = ", ".join(f"{host} {card}" for host, card in summary.cards.items())
        parts += [links, *_slow_links(summary.links), f"network of the gloo groups: {cards}"]
    if summary.slowest_rank is not None:
        parts.append(
            f"slowest rank: {summary.slowest_rank}, {summary.slowest_factor:.2f} times the median for work of its own"
        )
    data = {
        "problems": list(summary.problems),
        "slowest_rank": summary.slowest_rank,
        "slowest_factor": summary.slowest_factor,
        "axes": [dict(zip(columns, row, strict=True)) for row in rows],
        "links": [dict(zip(links.columns, row, strict=True)) for row in links.rows],
        "cards": dict(summary.cards),
    }
    return Document(tuple(parts), lambda: data, lambda: table)


def _links_table(links: Sequence[LinkReport]) -> Table:
    """Return a row for the links inside hosts, and one for those between hosts."""
    columns = ("link", "pairs", "latency us", "GB/s", "slowest pair", "its GB/s")
    rows = []
    for name, crosses in (("inside a host", False), ("between hosts", True)):
        kind = [link for link in links if link.crosses is crosses]
        if kind:
            slowest = min(kind, key=lambda link: link.bandwidth)
            rows.append(
                (
                    name,
                    len(kind),
                    round(statistics.median(link.latency for link in kind) * 1e6, 1),
                    round(statistics.median(link.bandwidth for link in kind) / 1e9, 3),
                    " - ".join(dict.fromkeys(slowest.hosts)),
                    round(slowest.bandwidth / 1e9, 3),
                )
            )
    return Table(columns, tuple(rows))


def _slow_links(links: Sequence[LinkReport]) -> list[str]:
    """Return a sentence for each pair of hosts whose link has less than half of the median bandwidth."""
    between = [link for link in links if link.crosses]
    if len(between) < _FEWEST_TO_COMPARE:
        return []
    median = statistics.median(link.bandwidth for link in between)
    return [
        f"slow: {link.hosts[0]} - {link.hosts[1]}, {link.bandwidth / median:.2f} of the median of {len(between)} pairs of hosts"
        for link in sorted(between, key=lambda link: link.bandwidth)
        if link.bandwidth < median / 2
    ][:_SHOWN]
