"""Write the plans of :mod:`namedmesh.plan.core` as documents, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from namedmesh.errors import count_of
from namedmesh.plan.cells import Grid
from namedmesh.plan.core import plan_rank
from namedmesh.plan.members import Groups, Members, in_words
from namedmesh.plan.tables import Document, Table, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from namedmesh.plan.core import OnAxis, Plan

_WIDTH = 100
_LINES = 3
"""How many lines of groups of one kind are shown by default."""
_LISTED = 4096
"""How many ranks of one kind are listed for programs by default."""
_PICTURED = 128
"""How many ranks a terminal shows in their nodes."""


def plan_document(plan: Plan, *, everything: bool = False, color_by: str | None = None) -> Document:
    """Write a plan as text and tables, with every group if asked for; an axis colors the picture of a terminal."""
    dialect = plan.arrangement.dialect
    head = [f"{dialect.name}: {plan.layout}, the last axis fastest"]
    if plan.expert is not None:
        head.append(f"experts: {plan.expert}")
    if dialect.words:
        words = ", ".join(f"{axis} is {word}" for axis, word in dialect.words.items())
        head.append(f"in its words, {words}")
    parts: list[str | Table] = ["\n".join(head), _kinds_table(plan)]
    listed = [kind for kind in plan.kinds if everything or kind.communicator == "own"]
    parts += [_groups_text(kind, everything) for kind in listed]
    parts.append(_replicas_text(plan, everything))
    parts.append(
        f"communicators: a rank asks for {count_of(plan.asked, 'group')} beside the world's and, with one for each "
        f"set of ranks, holds {count_of(plan.communicators, 'communicator')}\n"
        f"{count_of(plan.calls, 'group')} in the whole world"
    )
    if plan.placements:
        parts.append(_placements_table(plan))
    parts.append("\n".join(f"warning: {warning}" for warning in plan.warnings))
    return Document(
        tuple(parts),
        lambda: _plan_data(plan, everything),
        lambda: _groups_table(plan, everything),
        (lambda: Grid(plan).blocks(color_by)) if plan.world_size <= _PICTURED else None,
    )


def rank_document(plan: Plan, rank: int) -> Document:
    """Write one rank as text."""
    one = plan_rank(plan, rank)
    where = f", node {one.node}" if one.node is not None else ""
    lines = [f"rank {one.rank} of {plan.layout}{where}"]
    for own in one.axes:
        if own.size == 1:
            lines.append(f"  {own.axis} 0, alone")
        else:
            lines.append(f"  {own.axis} {own.at} of 0 to {own.size - 1}, with ranks {in_words(own.peers)}")
    if "pp" in plan.layout and plan.layout["pp"] > 1:
        before = f"receives from rank {one.previous}" if one.previous is not None else "the first stage"
        after = f"sends to rank {one.next}" if one.next is not None else "the last stage"
        lines.append(f"  pipeline: {before}, {after}")
    same = f"the same samples as ranks {in_words(one.batch)}" if len(one.batch) > 1 else "samples of its own"
    lines.append(f"  batch: part {one.data_rank} of 0 to {one.data_size - 1}, {same}")
    lines.append(f"  parameters: {_slice_words(one.slice, one.copies)}")
    if plan.expert is not None:
        lines.append(f"  experts: {_slice_words(one.expert_slice, one.expert_copies)}")
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (name, len(group), " ".join(map(str, group))) for name, group in one.groups.items()
    )
    table = Table(("kind", "size", "ranks"), rows)
    data: dict[str, Any] = {"coords": {own.axis: own.at for own in one.axes}, "share": one.share}
    data |= {name: _as_data(value) for name, value in vars(one).items() if name != "axes"}
    return Document(("\n".join(lines),), lambda: data, lambda: table)


def _kinds_table(plan: Plan) -> Table:
    plain = {"own": "its own", "world": "the world's", "none": "none, one rank"}
    rows = []
    for kind in plan.kinds:
        served = plain.get(kind.communicator, f"that of {kind.communicator}")
        members = {"all": "", "ends": "ends of ", "first": "first of "}[kind.kind.members]
        rows.append((kind.name, members + " x ".join(kind.kind.axes), kind.size, kind.count, served))
    return Table(("kind", "axes", "size", "groups", "communicator"), tuple(rows))


def _groups_text(groups: Groups, everything: bool) -> str:
    title = f"{groups.name}, {count_of(groups.count, 'group')} of {count_of(groups.size, 'rank')}:"
    shown = groups.first(groups.count if everything else _LINES * _WIDTH // 4)
    texts = [f"({in_words(group, len(group) if everything else 16)})" for group in shown]
    lines, used = _filled(texts, None if everything else _LINES)
    if used < groups.count:
        lines.append(f"... and {groups.count - used} more")
    return "\n  ".join([title, *lines])


def _filled(texts: Sequence[str], limit: int | None) -> tuple[list[str], int]:
    """Fill lines with texts, up to a number of lines; return the lines, and how many texts are in them."""
    lines = [""]
    for used, text in enumerate(texts):
        if lines[-1] and len(lines[-1]) + 1 + len(text) > _WIDTH:
            if len(lines) == limit:
                return lines, used
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines, len(texts)


def replicas_line(plan: Plan) -> str:
    """Return how many model replicas there are, and the axes that each is over."""
    axes = " x ".join(plan.replica_axes)
    return f"{count_of(plan.replicas.count, 'model replica')}, {f'each over {axes}' if axes else 'each on one rank'}"


def _replicas_text(plan: Plan, everything: bool) -> str:
    replicas = plan.replicas
    shown = replicas.first(replicas.count if everything else 8)
    lines = [replicas_line(plan)]
    lines += [
        f"  {number}: {in_words(group, len(group) if everything else 16)}"
        for number, group in enumerate(shown)
    ]
    if len(shown) < replicas.count:
        lines.append(f"  ... and {replicas.count - len(shown)} more")
    return "\n".join(lines)


def _placements_table(plan: Plan) -> Table:
    domains = () if plan.nvlink_domain is None else ("across NVLink domains",)
    rows = []
    for one in plan.placements:
        across = (one.across_nodes, one.across_domains)[: 1 + len(domains)]
        rows.append((one.axis, one.size, one.groups, *across, one.words))
    return Table(("axis", "size", "groups", "across nodes", *domains, "where"), tuple(rows))


def _slice_words(slices: Sequence[OnAxis], copies: Members) -> str:
    parts = ", ".join(f"{own.axis} part {own.at} of 0 to {own.size - 1}" for own in slices) or "all of them"
    whole = prod(own.size for own in slices)
    share = f" (1/{whole})" if whole > 1 else ""
    held = f"the same on ranks {in_words(copies)}" if len(copies) > 1 else "held by no other rank"
    return f"{parts}{share}, {held}"


def _plan_data(plan: Plan, everything: bool) -> dict[str, Any]:
    return {
        "dialect": plan.arrangement.dialect.name,
        "world_size": plan.world_size,
        "axes": dict(plan.layout.items()),
        "expert_axes": None if plan.expert is None else dict(plan.expert.items()),
        "kinds": [_groups_data(groups, everything) for groups in plan.kinds],
        "replicas": _groups_data(plan.replicas, everything),
        "communicators": {"asked": plan.asked, "held": plan.communicators, "groups_in_world": plan.calls},
        "gpus_per_node": plan.gpus_per_node,
        "nvlink_domain": plan.nvlink_domain,
        "placements": [
            {"layout" if name == "view" else name: value for name, value in asdict(placement).items()}
            for placement in plan.placements
        ],
        "warnings": list(plan.warnings),
    }


def _groups_data(groups: Groups, everything: bool) -> dict[str, Any]:
    return {
        "name": groups.name,
        "axes": list(groups.kind.axes),
        "layout": groups.kind.view,
        "members": groups.kind.members,
        "size": groups.size,
        "count": groups.count,
        "communicator": groups.communicator,
        "groups": [list(group) for group in _listed(groups, everything)],
    }


def _groups_table(plan: Plan, everything: bool) -> Table:
    """Write a row for each group, whether it crosses nodes and NVLink domains (1 or 0), and one for each warning."""
    columns = (
        *("kind", "axes", "layout", "size", "count", "group", "ranks"),
        *("crosses_nodes", "crosses_domains", "warning"),
    )
    rows: list[tuple[Value, ...]] = []
    for groups in plan.kinds:
        start = (groups.name, " ".join(groups.kind.axes), groups.kind.view, groups.size, groups.count)
        listed = _listed(groups, everything)
        for number, group in enumerate(listed):
            crossings = (
                None if block is None else int(group.first // block != group[-1] // block)
                for block in (plan.gpus_per_node, plan.nvlink_domain)
            )
            rows.append((*start, number, " ".join(map(str, group)), *crossings, None))
        if not listed:
            rows.append((*start, *(None,) * 5))
    rows += [("warning", *(None,) * 8, warning) for warning in plan.warnings]
    return Table(columns, tuple(rows))


def _listed(groups: Groups, everything: bool) -> list[Members]:
    return groups.first(groups.count if everything else _LISTED // groups.size)


def _as_data(value: Any) -> Any:
    """Describe groups, which may be as large as the world, by sizes and strides, and by their ranks if they are few."""
    if isinstance(value, dict):
        return {name: _as_data(group) for name, group in value.items()}
    if isinstance(value, Members):
        runs = [{"size": size, "stride": stride} for size, stride in value.runs]
        ranks = list(value) if len(value) <= _LISTED else None
        return {"size": len(value), "first": value.first, "runs": runs, "ranks": ranks}
    if isinstance(value, tuple):
        return {own.axis: [own.at, own.size] for own in value}
    return value
