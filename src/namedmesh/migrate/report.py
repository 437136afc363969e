"""Write the report of a scan, as text for people or JSON for programs, and the page with the table of Megatron."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from namedmesh.errors import count_of
from namedmesh.migrate.apis import API, INITIALIZE_NAME
from namedmesh.migrate.table import SECTIONS, TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from namedmesh.migrate.findings import Finding, Missing, Scan
    from namedmesh.migrate.rules import Advice

_INSTALL = "import namedmesh.compat.megatron; namedmesh.compat.megatron.install()"
_MISSING = "These imports need megatron-core, and have no replacement without it:"
# Slots of other libraries, which take a group of a mesh.
_ELSEWHERE = {
    "deepspeed.utils.groups": "namedmesh.compat.deepspeed.groups.bind(mesh)",
    "torchtitan ParallelDims(...)": "namedmesh.compat.torchtitan.parallel_dims(mesh)",
    "verl.utils.ulysses": 'set_ulysses_sequence_parallel_group(mesh.group("sp"))',
    "yunchang.globals, Ulysses": 'PROCESS_GROUP.ULYSSES_PG = mesh.group("sp")',
    "yunchang.globals, ring attention": 'PROCESS_GROUP.RING_PG = mesh.group("cp")',
}
_WIDTH = 56  # of the left column of the page; a longer call has a line of its own
_VIEW = re.compile(r'mesh\.add_view\("(\w+)"')


def as_text(scan: Scan) -> str:
    """Write the uses by file, the statements to run once, the remarks, and a summary.

    Example:
        >>> from namedmesh.migrate.scan import scan
        >>> print(as_text(scan([])), end="")
        No use of megatron.core.parallel_state in 0 files.
    """
    blocks = []
    if scan.problems:
        blocks.append("\n".join(f"{path}: {message}" for path, message in scan.problems))
    if scan.missing:
        places: dict[str, list[Missing]] = {}
        for one in scan.missing:
            places.setdefault(one.module, []).append(one)
        lines = [_MISSING]
        for module, (first, *others) in sorted(places.items()):
            more = f" and {count_of(len(others), 'other place')}" if others else ""
            lines.append(f"{module}: {first.path}:{first.line}{more}")
        blocks.append("\n    ".join(lines))
    blocks += scan.remarks
    if not scan.findings:
        blocks.append(f"No use of megatron.core.parallel_state in {count_of(scan.files, 'file')}.")
        return "\n\n".join(blocks) + "\n"
    remarks: dict[str, int] = {}
    for _, findings in groupby(scan.findings, key=lambda finding: finding.path):
        blocks.append("\n".join(_line(finding, remarks) for finding in findings))
    setup = merge_setup(scan.findings)
    if setup:
        blocks.append("\n    ".join(["Once, on every rank, after init_mesh:", *setup]))
    if remarks:
        blocks.append(_numbered(remarks))
    return "\n\n".join([*blocks, _summary(scan)]) + "\n"


def as_json(scan: Scan) -> str:
    """Write the same as an object: ``findings``, ``once``, ``problems``, ``summary`` and ``meanwhile``.

    Example:
        >>> from namedmesh.migrate.scan import scan
        >>> json.loads(as_json(scan([])))["summary"]["files"]
        0
    """
    report = {
        "findings": [asdict(one) for one in scan.findings],
        "once": merge_setup(scan.findings),
        "problems": [one._asdict() for one in scan.problems],
        "missing": [one._asdict() for one in scan.missing],
        "remarks": scan.remarks,
        "summary": _counts(scan),
        "meanwhile": _INSTALL,
    }
    return json.dumps(report, indent=2) + "\n"


def merge_setup(findings: Iterable[Finding]) -> list[str]:
    """Merge the statements to run once: each view with the sizes or options that one of the findings needs, then products."""
    products: dict[str, None] = {}
    views: dict[str, str] = {}
    priorities: dict[str, int] = {}
    for finding in findings:
        for statement in finding.once:
            view = _VIEW.match(statement)
            if view is None:
                products[statement] = None
                continue
            priority = 2 if "options=" in statement else int(finding.name == INITIALIZE_NAME)
            if priority > priorities.get(view[1], -1):
                views[view[1]], priorities[view[1]] = statement, priority
    return [*(views[name] for name in sorted(views)), *sorted(products)]


def _line(finding: Finding, remarks: dict[str, int]) -> str:
    dialect = API[finding.origin].dialect
    stays = f"stays in {dialect}" if dialect else "has no replacement"
    otherwise = stays if finding.known else "not in the table"
    doubt = "" if finding.certain else " (not certain)"
    new = (finding.replacement or otherwise) + _marks(finding.notes, remarks)
    return f"{finding.path}:{finding.line}: {finding.legacy}{doubt} -> {new}"


def _marks(notes: Iterable[str], remarks: dict[str, int]) -> str:
    """Return the numbers of some remarks; new ones are added to those that are numbered."""
    return "".join(f" [{remarks.setdefault(note, len(remarks) + 1)}]" for note in notes)


def _numbered(remarks: dict[str, int]) -> str:
    return "\n".join(f"[{number}] {remark}" for remark, number in remarks.items())


def _counts(scan: Scan) -> dict[str, Any]:
    findings = scan.findings
    return {
        "uses": len(findings),
        "names": len({finding.name for finding in findings}),
        "files_with_uses": len({finding.path.split("[cell ")[0] for finding in findings}),
        "files": scan.files,
        "mesh": sum(bool(finding.replacement) for finding in findings),
        "dialect": sum(not finding.replacement and finding.known for finding in findings),
        "unknown": sum(not finding.known for finding in findings),
        "not_certain": sum(not finding.certain for finding in findings),
        "unreadable": len(scan.problems),
    }


def _summary(scan: Scan) -> str:
    counts = _counts(scan)
    parts = [f"{counts['mesh']} with a replacement", f"{counts['dialect']} without one"]
    if counts["unknown"]:
        parts.append(f"{counts['unknown']} not in the table")
    uses = f"{count_of(counts['uses'], 'use')} of {count_of(counts['names'], 'name')}"
    files = f"{count_of(counts['files_with_uses'], 'file')} (of {counts['files']})"
    lines = [f"{uses} in {files}: {', '.join(parts)}."]
    if counts["not_certain"]:
        lines.append(f"{counts['not_certain']} not certain: their remarks say why; check them.")
    if counts["unreadable"]:
        lines.append(f"{count_of(counts['unreadable'], 'file')} could not be read or rewritten; see the top.")
    lines.append(f"Until all have moved, the code runs unchanged on a mesh with: {_INSTALL}")
    return "\n".join(lines)


def advise(legacy: str) -> Advice:
    """Return the code that replaces a legacy call or name of Megatron, given as source text.

    Raises:
        KeyError: the name is not in the table.

    Example:
        >>> advise("get_data_parallel_world_size(with_context_parallel=True)").replacement
        'mesh.size("dp", "cp")'
    """
    node = ast.parse(legacy, mode="eval").body
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return TABLE[name].advise(node)


def rows(section: str) -> Iterator[tuple[str, Advice]]:
    """Yield each legacy call of a section, as the page shows it, and its advice."""
    for row in SECTIONS[section]:
        for legacy in row.calls():
            yield legacy, advise(legacy)


def page() -> str:
    """Write the table: a line for each call, and numbered remarks below.

    Example:
        >>> "get_pipeline_model_parallel_next_rank()" in page()
        True
    """
    remarks: dict[str, int] = {}
    lines: list[str] = []
    for section in SECTIONS:
        lines += [section, "-" * len(section), ""]
        for legacy, advice in rows(section):
            notes = [*(f"once: {statement}" for statement in advice.once), *advice.notes]
            call = f"    {legacy:<{_WIDTH}}"
            if len(legacy) > _WIDTH:
                lines.append(call)
                call = " " * (_WIDTH + 4)
            lines.append(f"{call}  {advice.replacement or 'stays'}{_marks(notes, remarks)}")
        lines.append("")
    lines += ["Other libraries", "---------------", ""]
    lines += [f"    {slot:<{_WIDTH}}  {code}" for slot, code in _ELSEWHERE.items()]
    return "\n".join([*lines, "", "Remarks", "-------", "", _numbered(remarks), ""])
