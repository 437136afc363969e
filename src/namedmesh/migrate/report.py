"""The findings of a scan as text for people and as JSON for programs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from namedmesh.migrate.rules import DIALECT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from namedmesh.migrate.scan import Finding, Scan

__all__ = ["INSTALL", "as_json", "as_text", "statements"]

INSTALL = "import namedmesh.compat.megatron; namedmesh.compat.megatron.install()"
"""The line with which unmodified code keeps running meanwhile."""

_VIEW = re.compile(r'mesh\.add_view\("(\w+)"')


def as_text(scan: Scan) -> str:
    """What was found, by file; what to run once; remarks; and a summary.

    Example:
        >>> from namedmesh.migrate.scan import scan
        >>> print(as_text(scan([])), end="")
        No use of megatron.core.parallel_state in 0 files.
    """
    blocks = [f"{problem.path}: {problem.message}" for problem in scan.problems]
    blocks = ["\n".join(blocks)] * bool(blocks)
    if not scan.findings:
        blocks.append(f"No use of megatron.core.parallel_state in {_many(scan.files, 'file')}.")
        return "\n\n".join(blocks) + "\n"
    remarks: dict[str, int] = {}
    for _, found in groupby(scan.findings, key=lambda finding: finding.path):
        blocks.append("\n".join(_line(finding, remarks) for finding in found))
    once = statements(scan.findings)
    if once:
        blocks.append("\n".join(["Once, on every rank, after init_mesh:", *(f"    {one}" for one in once)]))
    if remarks:
        blocks.append("\n".join(f"[{number}] {remark}" for remark, number in remarks.items()))
    blocks.append(_summary(scan))
    return "\n\n".join(blocks) + "\n"


def as_json(scan: Scan) -> str:
    """The same as an object: ``findings``, ``once``, ``problems`` and ``summary``.

    Example:
        >>> from namedmesh.migrate.scan import scan
        >>> json.loads(as_json(scan([])))["summary"]["files"]
        0
    """
    whole = {
        "findings": [asdict(finding) for finding in scan.findings],
        "once": statements(scan.findings),
        "problems": [asdict(problem) for problem in scan.problems],
        "summary": _counts(scan),
        "meanwhile": INSTALL,
    }
    return json.dumps(whole, indent=2) + "\n"


def statements(findings: Iterable[Finding]) -> list[str]:
    """What every rank runs once for all of the findings: views first, then products of their axes.

    A view that several findings ask for is there once: as the code's own initialisation says its sizes, or
    with the options that one of them needs.

    Example:
        >>> from namedmesh.migrate.scan import scan
        >>> statements(scan([]).findings)
        []
    """
    others: dict[str, None] = {}
    views: dict[str, str] = {}
    rank: dict[str, int] = {}
    for finding in findings:
        for statement in finding.once:
            view = _VIEW.match(statement)
            if view is None:
                others[statement] = None
                continue
            weight = 2 if "options=" in statement else int(finding.name == "initialize_model_parallel")
            if weight > rank.get(view[1], -1):
                views[view[1]], rank[view[1]] = statement, weight
    return [*(views[name] for name in sorted(views)), *sorted(others)]


def _line(finding: Finding, remarks: dict[str, int]) -> str:
    marks = "".join(f" [{remarks.setdefault(note, len(remarks) + 1)}]" for note in finding.notes)
    otherwise = f"stays in {DIALECT}" if finding.known else "not in the table"
    replacement = finding.replacement or otherwise
    doubt = "" if finding.certain else " (by name only)"
    return f"{finding.path}:{finding.line}: {finding.legacy}{doubt} -> {replacement}{marks}"


def _counts(scan: Scan) -> dict[str, Any]:
    found = scan.findings
    return {
        "uses": len(found),
        "names": len({finding.name for finding in found}),
        "files_with_uses": len({finding.path.split("[cell ")[0] for finding in found}),
        "files": scan.files,
        "mesh": sum(bool(finding.replacement) for finding in found),
        "dialect": sum(not finding.replacement and finding.known for finding in found),
        "unknown": sum(not finding.known for finding in found),
        "by_name_only": sum(not finding.certain for finding in found),
        "unreadable": len(scan.problems),
    }


def _summary(scan: Scan) -> str:
    counts = _counts(scan)
    parts = [f"{counts['mesh']} with a replacement", f"{counts['dialect']} to stay in {DIALECT}"]
    parts += [f"{counts['unknown']} not in the table"] * bool(counts["unknown"])
    found = f"{_many(counts['uses'], 'use')} of {_many(counts['names'], 'name')}"
    where = f"{_many(counts['files_with_uses'], 'file')} (of {counts['files']})"
    lines = [f"{found} in {where}: {', '.join(parts)}."]
    if counts["by_name_only"]:
        lines.append(
            f"{counts['by_name_only']} by name only: no import says where the name comes from; check them."
        )
    if counts["unreadable"]:
        lines.append(f"{_many(counts['unreadable'], 'file')} could not be read; see the top.")
    lines.append(f"Until all have moved, the code runs unchanged on a mesh with: {INSTALL}")
    return "\n".join(lines)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
