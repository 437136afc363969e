"""Find every use of a name of the tables in a code base, and what replaces it; the code is neither changed nor run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from namedmesh.errors import NamedMeshError
from namedmesh.migrate.apis import APIS, FAIRSCALE
from namedmesh.migrate.files import UnreadableError, check_syntax, python_files, read
from namedmesh.migrate.rules import axes_of
from namedmesh.migrate.table import TABLE

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from namedmesh.migrate.names import Names

_WORD = re.compile(rb"[A-Za-z_]\w+")
_COMMON = {"logger", "is_initialized", "create_group"}  # names that do not suggest a legacy API by themselves
_LEGACY_WORDS = frozenset(word.encode() for word in {"mpu", "parallel_state", *TABLE, *FAIRSCALE} - _COMMON)
_IMPORT = re.compile(rb"^\s*(?:from|import)\s+megatron\b", re.MULTILINE)
INITIALIZE_NAME = "initialize_model_parallel"
"""The name of the function that makes the groups, in each of the APIs."""


class MissingExtraError(NamedMeshError, ImportError):
    """A package that a command needs is not installed."""


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


API = {api.name: api for api in APIS}
"""The legacy APIs by name."""


@dataclass(frozen=True, order=True)
class Problem:
    """A file that could not be read or rewritten, and why."""

    path: str
    message: str


@dataclass(frozen=True, order=True)
class Missing:
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
    """

    files: int
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]
    missing: tuple[Missing, ...] = ()
    remarks: tuple[str, ...] = ()


def require_libcst() -> None:
    """Check that the extra is installed.

    Raises:
        MissingExtraError: it is not.
    """
    try:
        import libcst  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "this needs LibCST, which is not installed; install it with: pip install 'namedmesh[migrate]'"
        ) from None


def scan(paths: Sequence[str | os.PathLike[str]], *, megatron: str | None = None) -> Scan:
    """Find every use of Megatron's, fairscale's or GPT-NeoX's groups, also by way of the code's own modules.

    Args:
        paths: modules, notebooks, and folders of them.
        megatron: the release of megatron-core that the code runs with, such as ``"0.13"``, if that is known.

    Raises:
        MissingExtraError: LibCST is not installed.

    Example:
        >>> scan([]).findings
        ()
    """
    require_libcst()
    from namedmesh.migrate.names import Names

    files = list(python_files(paths))
    scanner = _Scanner(Names(files, paths), tuple(map(int, re.findall(r"\d+", megatron or ""))))
    words = _LEGACY_WORDS
    seen: set[bytes] = set()
    while words:  # further names under which the code's own modules hand out legacy ones
        seen |= words
        words = scanner.scan(files, words) - seen
    return Scan(
        len(files),
        tuple(sorted(_doubted(scanner.findings))),
        tuple(sorted(scanner.problems)),
        tuple(sorted(scanner.missing)),
    )


class _Scanner:
    """The findings so far; no tree is kept."""

    def __init__(self, names: Names, release: tuple[int, ...]) -> None:
        self.findings: list[Finding] = []
        self.problems: list[Problem] = []
        self.missing: set[Missing] = set()
        self._names, self._release = names, release
        self._done: set[Path] = set()
        self._aliases: set[bytes] = set()

    def scan(self, files: Iterable[Path], words: frozenset[bytes]) -> frozenset[bytes]:
        """Scan the files that have one of some words, and were not scanned; return the words that now matter."""
        for path in files:
            if path in self._done:
                continue
            try:
                self._scan(path, words)
            except UnreadableError as error:
                self._done.add(path)
                self.problems.append(Problem(str(path), str(error)))
        return frozenset(self._aliases)

    def _scan(self, path: Path, words: frozenset[bytes]) -> None:
        import libcst as cst

        from namedmesh.migrate.names import exports_of
        from namedmesh.migrate.uses import Uses

        source = read(path)
        has_uses = not words.isdisjoint(_WORD.findall(source.code))
        if not has_uses and (words is not _LEGACY_WORDS or not _IMPORT.search(source.code)):
            return
        if has_uses:
            self._done.add(path)
        check_syntax(source.code)
        try:
            module = cst.parse_module(source.code)
            exports = exports_of(module, path)
            self._names.add(path, exports)
            uses = Uses(source, path, self._names, self._release).run(module, imports_only=not has_uses)
        except (cst.ParserSyntaxError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise UnreadableError(f"cannot be parsed by LibCST: {reason or type(error).__name__}") from None
        self.findings += uses.findings
        self.missing |= uses.missing
        for name, targets in exports.names.items():
            if any(self._names.meanings(target) - {None} for target in targets if target):
                self._aliases.add(name.encode())


def _doubted(findings: list[Finding]) -> list[Finding]:
    """Mark the uses whose answers the code changes elsewhere, by ``set_...`` or by an assignment."""
    changes = [(one, _changed_axes(one)) for one in findings if one.changes]
    result = []
    for one in findings:
        by = next((change for change, axes in changes if one.certain and _touches(change, axes, one)), None)
        if by is None:
            result.append(one)
        else:
            note = f"{by.legacy} in {by.path}:{by.line} can change the answer"
            result.append(replace(one, certain=False, notes=(*one.notes, note)))
    return result


def _touches(change: Finding, axes: set[str] | None, one: Finding) -> bool:
    """Return whether a change of the answers over some axes concerns a use; None stands for all axes."""
    if API[change.origin].table is not API[one.origin].table or one.name == INITIALIZE_NAME or one.changes:
        return False
    return axes is None or bool(axes & axes_of(one.replacement))


def _changed_axes(one: Finding) -> set[str] | None:
    """Return the axes about which a change makes the legacy calls answer differently; None if it is not known."""
    table = API[one.origin].table
    if one.name in {"", INITIALIZE_NAME}:
        return None
    getter = one.name.lower().replace("_mpu_", "get_", 1) if one.name.startswith("_MPU_") else one.name
    return axes_of(
        table[getter.replace("set_", "get_", 1) if getter.startswith("set_") else getter].replacement
    )
