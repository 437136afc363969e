"""From what every rank saw to one table and a list of what is wrong."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.errors import listing
from namedmesh.plan.tables import Document, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from namedmesh.plan.doctor.checks import AxisReport, RankReport

__all__ = ["Diagnosis", "diagnose", "doctor_document"]


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
class Diagnosis:
    """What the doctor found.

    Args:
        axes: the axes that were measured; empty if something is wrong.
        slowest_rank: the rank whose own matrix product took longest.
        slowest_factor: its time over the median.
        problems: a sentence for each thing that is wrong, with the axis and the ranks.
    """

    axes: tuple[AxisSummary, ...]
    slowest_rank: int | None
    slowest_factor: float
    problems: tuple[str, ...]


def diagnose(reports: Mapping[int, RankReport | None]) -> Diagnosis:
    """Put together what the ranks saw; None stands for a rank that did not report."""
    there = [report for report in reports.values() if report is not None]
    silent = [rank for rank, report in reports.items() if report is None]
    problems = _problems(there)
    if silent:
        problems.append(f"{_ranks(silent)} stopped answering in the middle of the checks")
    if problems or not there:
        return Diagnosis((), None, 1.0, tuple(problems))
    names = [seen.axis for seen in there[0].axes]
    columns = list(zip(*(report.axes for report in there), strict=True))
    slowest = max(there, key=lambda report: report.local)
    median = statistics.median(report.local for report in there)
    return Diagnosis(
        tuple(_summary(name, column) for name, column in zip(names, columns, strict=True)),
        slowest.rank,
        slowest.local / median if median else 1.0,
        (),
    )


def _problems(there: Sequence[RankReport]) -> list[str]:
    """What ranks complain about, by axis, and each complaint once for all ranks that have it."""
    complaints: dict[tuple[str, str], list[int]] = {}
    for report in there:
        for seen in report.axes:
            if seen.problem:
                complaints.setdefault((seen.axis, seen.problem), []).append(report.rank)
    return [f"axis {axis}, {_ranks(ranks)}: {problem}" for (axis, problem), ranks in complaints.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listing(ranks)}"


def _summary(name: str, column: Sequence[AxisReport]) -> AxisSummary:
    by_group: dict[tuple[int, ...], list[AxisReport]] = {}
    for seen in column:
        by_group.setdefault(seen.ranks, []).append(seen)
    speeds = {group: statistics.median(seen.bandwidth for seen in here) for group, here in by_group.items()}
    slowest = min(speeds, key=lambda group: speeds[group])
    return AxisSummary(
        name,
        len(slowest),
        len(by_group),
        statistics.median(seen.latency for seen in column),
        statistics.median(speeds.values()),
        slowest,
        speeds[slowest],
    )


def doctor_document(found: Diagnosis, headline: str) -> Document:
    """A diagnosis in words and as a table."""
    columns = ("axis", "size", "groups", "latency us", "GB/s", "slowest group", "its GB/s")
    rows = tuple(
        (
            seen.axis,
            seen.size,
            seen.groups,
            round(seen.latency * 1e6, 1),
            round(seen.bandwidth / 1e9, 3),
            listing(seen.slowest_group),
            round(seen.slowest_bandwidth / 1e9, 3),
        )
        for seen in found.axes
    )
    table = Table(columns, rows)
    parts: list[str | Table] = [headline]
    if found.problems:
        parts.append("\n".join(f"wrong: {problem}" for problem in found.problems))
    else:
        parts += [table, "every group has the right ranks and gives the right sum"]
    if found.slowest_rank is not None:
        parts.append(
            f"slowest rank: {found.slowest_rank}, {found.slowest_factor:.2f} times the median for work of its own"
        )
    data = {
        "problems": list(found.problems),
        "slowest_rank": found.slowest_rank,
        "slowest_factor": found.slowest_factor,
        "axes": [dict(zip(columns, row, strict=True)) for row in rows],
    }
    return Document(tuple(parts), lambda: data, lambda: table)
