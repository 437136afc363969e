"""Write the reports of all ranks as tables and a list of problems."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from namedmesh.errors import listing, ranks_in_words
from namedmesh.plan.tables import Document, Table, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.plan.doctor.checks import AxisReport, LinkReport, RankReport

# A median of fewer pairs says nothing about one of them.
_FEWEST_TO_COMPARE = 3
_SHOWN = 8


def problems_of(reports: Mapping[int, RankReport | None]) -> list[str]:
    """Return the problems of all ranks by axis, each once; None stands for a rank that did not report."""
    holders: dict[tuple[str, str], list[int]] = {}
    for report in filter(None, reports.values()):
        for axis in report.axes:
            if axis.problem:
                holders.setdefault((axis.axis, axis.problem), []).append(report.rank)
    problems = [
        f"axis {axis}, {ranks_in_words(ranks)}: {problem}" for (axis, problem), ranks in holders.items()
    ]
    silent = [rank for rank, report in reports.items() if report is None]
    if silent:
        problems.append(f"{ranks_in_words(silent)} stopped answering in the middle of the checks")
    return problems


def doctor_document(
    reports: Mapping[int, RankReport | None], links: Sequence[LinkReport], headline: str
) -> Document:
    """Write the reports of all ranks, and the links between hosts, as text and as tables."""
    problems = problems_of(reports)
    present = [report for report in reports.values() if report is not None]
    rows, measured, cards = [], _links_table(links), {}
    if not problems:
        rows = [_axis_row(column) for column in zip(*(one.axes for one in present), strict=True)]
        cards = {report.host: report.card for report in present}
    table = Table(("axis", "size", "groups", "latency us", "GB/s", "slowest group", "its GB/s"), tuple(rows))
    data: dict[str, Any] = {"problems": problems, "slowest_rank": None, "slowest_factor": 1.0}
    parts: list[str | Table] = [headline]
    if problems:
        parts.append("\n".join(f"wrong: {problem}" for problem in problems))
    else:
        parts += [table, "every group has the right ranks and gives the right sum"]
        if links:
            names = ", ".join(f"{host} {card}" for host, card in cards.items())
            parts += [measured, *_slow_links(links), f"network of the gloo groups: {names}"]
        slowest = max(present, key=lambda report: report.local)
        factor = slowest.local / (statistics.median(report.local for report in present) or 1.0)
        parts.append(f"slowest rank: {slowest.rank}, {factor:.2f} times the median for work of its own")
        data |= {"slowest_rank": slowest.rank, "slowest_factor": factor}
    data["axes"] = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    data["links"] = [dict(zip(measured.columns, row, strict=True)) for row in measured.rows]
    data["cards"] = cards
    return Document(tuple(parts), lambda: data, lambda: table)


def _axis_row(column: Sequence[AxisReport]) -> tuple[Value, ...]:
    """Return the row of one axis, from what each rank found on it."""
    by_group: dict[str, list[AxisReport]] = {}
    for report in column:
        by_group.setdefault(listing(report.ranks), []).append(report)
    return column[0].axis, len(column[0].ranks), *_speeds(by_group)


def _links_table(links: Sequence[LinkReport]) -> Table:
    """Return a row for the links inside hosts, and one for those between hosts."""
    rows = []
    for name, crosses in (("inside a host", False), ("between hosts", True)):
        kind = {" - ".join(dict.fromkeys(link.hosts)): [link] for link in links if link.crosses is crosses}
        if kind:
            rows.append((name, *_speeds(kind)))
    return Table(("link", "pairs", "latency us", "GB/s", "slowest pair", "its GB/s"), tuple(rows))


def _speeds(measured: Mapping[str, Sequence[AxisReport | LinkReport]]) -> tuple[Value, ...]:
    """Return how many there are, their median latency and bandwidth, and the slowest with its own."""
    latency = statistics.median(one.latency for ones in measured.values() for one in ones)
    bandwidths = {name: statistics.median(one.bandwidth for one in ones) for name, ones in measured.items()}
    slowest = min(bandwidths, key=bandwidths.__getitem__)
    whole, least = statistics.median(bandwidths.values()), bandwidths[slowest]
    return len(measured), round(latency * 1e6, 1), round(whole / 1e9, 3), slowest, round(least / 1e9, 3)


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
