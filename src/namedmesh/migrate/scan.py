"""Find every use of a name of the tables in a code base, and what replaces it; the code is neither changed nor run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from namedmesh.migrate.codebase import CodeBase
from namedmesh.migrate.files import TOO_DEEP
from namedmesh.migrate.findings import API, INITIALIZE_NAME, Finding, Missing, Problem, Scan
from namedmesh.migrate.rules import axes_of
from namedmesh.migrate.uses import findings_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence


def scan(paths: Sequence[str | os.PathLike[str]], *, megatron: str | None = None) -> Scan:
    """Find every use of Megatron's, fairscale's or GPT-NeoX's groups, also by way of the code's own modules.

    Args:
        paths: modules, notebooks, and folders of them.
        megatron: the release of megatron-core that the code runs with, such as ``"0.13"``, if that is known.

    Example:
        >>> scan([]).findings
        ()
    """
    code = CodeBase(paths)
    release = tuple(map(int, re.findall(r"\d+", megatron or "")))
    problems = list(code.problems.values())
    findings: list[Finding] = []
    for module in code.modules:
        try:
            findings += findings_of(module, code, release)
        except RecursionError:  # noqa: PERF203  the other files are read
            problems.append(Problem(module.source.path, TOO_DEEP))
    findings.sort()
    missing = {
        Missing(*module.source.locate(line), name)
        for module in code.modules
        for line, needed in module.imports
        for name in needed
        if ".".join(name.split(".")[:2]) not in code.packages
    }
    return Scan(
        len(code.files),
        tuple(_doubted(findings)),
        tuple(sorted(problems)),
        tuple(sorted(missing)),
        sources={module.source.path: module.source for module in code.modules},
    )


def _doubted(findings: list[Finding]) -> Iterator[Finding]:
    """Yield the uses, in doubt where the code changes their answers elsewhere, by ``set_...`` or by an assignment."""
    changes = [(one, _changed_axes(one)) for one in findings if one.changes]
    for one in findings:
        own = axes_of(one.replacement)
        may_change = one.certain and not one.changes and one.name != INITIALIZE_NAME
        for by, axes in changes if may_change else ():
            same_table = API[by.origin].table is API[one.origin].table
            if same_table and (axes is None or axes & own):
                note = f"{by.legacy} in {by.path}:{by.line} can change the answer"
                yield replace(one, certain=False, notes=(*one.notes, note))
                break
        else:
            yield one


def _changed_axes(one: Finding) -> set[str] | None:
    """Return the axes about which a change makes the legacy calls answer differently; None if it is not known."""
    if one.name in {"", INITIALIZE_NAME}:
        return None
    getter = one.name.lower().replace("_mpu_", "get_", 1) if one.name.startswith("_MPU_") else one.name
    if getter.startswith("set_"):
        getter = getter.replace("set_", "get_", 1)
    return axes_of(API[one.origin].table[getter].replacement)
