"""What a scan finds: uses of legacy names, files that cannot be read, imports that have no replacement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.migrate.apis import API, APIS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.migrate.files import Source


@dataclass(frozen=True, order=True)
class Finding:
    """One use of a legacy name.

    Args:
        path: the file; for a notebook, with the cell.
        line: the line, from 1.
        column: the column, from 1.
        name: the legacy name; empty for one that is known at run time only.
        legacy: the call, or the name, as it is written.
        replacement: the expression that replaces it; empty where it stays in the dialect, or is not known.
        once: statements that every rank runs once before.
        notes: remarks.
        certain: whether it is certain what the name is and that nothing changes its answer; a remark says why not.
        end: the line and the column after the last character of a call; None for what is no call.
        origin: the module of the API, such as ``megatron.core.parallel_state``.
        changes: whether it changes what the legacy calls answer.
    """

    path: str
    line: int
    column: int
    name: str
    legacy: str
    replacement: str
    once: tuple[str, ...]
    notes: tuple[str, ...]
    certain: bool
    end: tuple[int, int] | None = None
    origin: str = APIS[0].name
    changes: bool = False

    @property
    def known(self) -> bool:
        """Whether the table has the name."""
        return self.name in API[self.origin].table


class Missing(NamedTuple):
    """An import that finds nothing where megatron-core is not installed, and that namedmesh does not replace."""

    path: str
    line: int
    module: str


@dataclass(frozen=True)
class Scan:
    """The uses of legacy names in some files.

    Args:
        files: how many files were read.
        findings: the uses, by file and line.
        problems: the files that could not be read.
        missing: imports of Megatron that have no replacement.
        remarks: what else is to be said about them.
        sources: the code of the files with uses, as it was read, by path.
    """

    files: int
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]
    missing: tuple[Missing, ...] = ()
    remarks: tuple[str, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)


class Problem(NamedTuple):
    """A file that could not be read or rewritten, and why."""

    path: str
    message: str
