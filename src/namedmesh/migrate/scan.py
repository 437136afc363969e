"""Find every use of a name of the tables in a code base, and what replaces it; the code is neither changed nor run."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from namedmesh.errors import NamedMeshError
from namedmesh.migrate.apis import APIS
from namedmesh.migrate.files import Source, UnreadableError, parse, python_files, read
from namedmesh.migrate.findings import API, INITIALIZE_NAME, Finding, Missing, Problem, Scan
from namedmesh.migrate.module import USUAL_NAMES, Module, Reader
from namedmesh.migrate.names import Names
from namedmesh.migrate.rules import axes_of
from namedmesh.migrate.uses import findings_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

_WORD = re.compile(rb"[A-Za-z_]\w+")
_COMMON = {"logger", "is_initialized", "create_group"}  # names that do not suggest a legacy API by themselves
_LEGACY_WORDS = frozenset((*USUAL_NAMES, *(name for api in APIS for name in api.table))) - _COMMON
_IMPORT = re.compile(rb"^\s*(?:from|import)\s+(megatron(?:\.\w+)?)\b", re.MULTILINE)
_FILES_FOR_A_POOL = 100


class MissingExtraError(NamedMeshError, ImportError):
    """A package that a command needs is not installed."""


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


def scan(paths: Sequence[str | os.PathLike[str]], *, megatron: str | None = None, processes: int = 1) -> Scan:
    """Find every use of Megatron's, fairscale's or GPT-NeoX's groups, also by way of the code's own modules.

    Args:
        paths: modules, notebooks, and folders of them.
        megatron: the release of megatron-core that the code runs with, such as ``"0.13"``, if that is known.
        processes: how many processes read a large code base.

    Raises:
        MissingExtraError: LibCST is not installed.

    Example:
        >>> scan([]).findings
        ()
    """
    require_libcst()
    files = list(python_files(paths))
    names = Names(files, paths, _imported)
    if processes > 1 and len(files) >= _FILES_FOR_A_POOL:
        with ProcessPoolExecutor(processes) as pool:
            problems = _read(files, names, partial(pool.map, chunksize=_FILES_FOR_A_POOL // 4))
    else:
        problems = _read(files, names, map)
    packages = names.packages
    release = tuple(map(int, re.findall(r"\d+", megatron or "")))
    modules = [module for module in names.modules.values() if module]
    findings = [found for module in modules for found in sorted(findings_of(module, names, release))]
    missing = {
        Missing(*module.source.locate(line), name)
        for module in modules
        for line, needed in module.imports
        for name in needed
        if ".".join(name.split(".")[:2]) not in packages
    }
    return Scan(
        len(files), tuple(sorted(_doubted(findings))), tuple(sorted(problems)), tuple(sorted(missing))
    )


def _read(
    files: Sequence[Path], names: Names, apply: Callable[..., Iterable[Module | Problem | None]]
) -> list[Problem]:
    """Read the files that may have uses, and return those that cannot be read.

    When the code's own modules hand out legacy names under further ones, the files that have these are read (again).
    """
    problems: dict[Path, Problem] = {}
    words, new = frozenset[str](), _LEGACY_WORDS
    while new:
        words |= new
        left = [path for path in files if path not in problems]
        wanted = frozenset(word.encode() for word in new)
        packages = names.packages if new == words else None  # the imports are looked at once
        read_one = partial(_read_one, wanted=wanted, words=words, packages=packages)
        for path, found in zip(left, apply(read_one, left), strict=True):
            if isinstance(found, Problem):
                problems[path] = found
            elif found is not None:
                names.modules[path] = found
        new = frozenset(names.aliases()) - words
    return list(problems.values())


def _read_one(
    path: Path, wanted: frozenset[bytes], words: frozenset[str], packages: frozenset[str] | None
) -> Module | Problem | None:
    """Read one file, if it has one of the wanted words or imports of Megatron what is not one of the packages."""
    try:
        source = read(path)
        has_one = not wanted.isdisjoint(_WORD.findall(source.code))
        if not has_one and packages is not None:
            has_one = any(name.decode() not in packages for name in _IMPORT.findall(source.code))
        return _module_of(source, path, words) if has_one else None
    except UnreadableError as error:
        return Problem(str(path), str(error))


def _module_of(source: Source, path: Path, words: frozenset[str]) -> Module:
    try:
        return Reader(source, path, words).read(parse(source))
    except RecursionError:
        raise UnreadableError("is nested too deeply") from None


def _imported(path: Path) -> Module | None:
    """Read a module that names nothing legacy itself, and that others import from."""
    try:
        return _module_of(read(path), path, _LEGACY_WORDS)
    except UnreadableError:
        return None


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
