"""The command ``namedmesh migrate``: report, show or write."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from difflib import unified_diff
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, UsageError, format_count

if TYPE_CHECKING:
    from namedmesh.migrate.program import Program
    from namedmesh.migrate.table import Advice
    from namedmesh.migrate.uses import FileUses

# Fewer files are read sooner in this process than in new ones.
_FEW_FILES = 40


def _configure(parser: ArgumentParser) -> None:
    text = "a module, or a folder of them; together all of a program"
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help=text)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--diff", action="store_true", help="show what --write changes, and report the rest")
    text = (
        "install the compatibility layer where the groups are made, replace what is certain, and report "
        "the rest; git is the backup"
    )
    how.add_argument("--write", action="store_true", help=text)
    parser.add_argument("--force", action="store_true", help="write although git is no backup there")


def _migrate(arguments: Namespace) -> int:
    """Scan, report, and perhaps write; return 1 if a file could not be read."""
    try:
        import libcst  # noqa: F401  the extra
    except ImportError:
        raise LayoutError("namedmesh migrate needs LibCST: pip install 'namedmesh[migrate]'") from None
    from namedmesh.migrate.program import Program

    if arguments.write and not arguments.force:
        _check_clean(arguments.paths)
    paths: dict[Path, None] = {}
    for path in arguments.paths:
        paths.update(dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path]))
    files = []
    problems = []
    for found in _read_all(list(paths)):
        if isinstance(found, str):
            problems.append(found)
        elif found is not None:
            files.append(found)
    program = Program(files, [str(path.resolve()) for path in paths])
    rewrites = arguments.diff or arguments.write
    if rewrites:
        for file in files:
            _write_or_show(program, file, write=arguments.write)
    sys.stdout.write(report(program, len(paths), shows_certain=not rewrites))
    notebooks = sum(len(list(path.rglob("*.ipynb"))) for path in arguments.paths)
    if notebooks:
        sys.stdout.write(f"\n{format_count(notebooks, 'notebook')}: not read\n")
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def _write_or_show(program: Program, file: FileUses, *, write: bool) -> None:
    after = program.rewrite(file)
    if after == file.source:
        return
    if write:
        file.path.write_bytes(after)
        sys.stdout.write(f"{file.path}: rewritten\n")
        return
    before_lines = file.source.decode().splitlines(keepends=True)
    after_lines = after.decode().splitlines(keepends=True)
    sys.stdout.write("".join(unified_diff(before_lines, after_lines, f"a/{file.path}", f"b/{file.path}")))


def _check_clean(paths: Sequence[Path]) -> None:
    """Raise unless git has everything that could be overwritten."""
    for path in paths:
        folder = path if path.is_dir() else path.parent
        words = ["git", "-C", str(folder), "status", "--porcelain", "--", str(path.resolve())]
        done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603  our own words
        if done.returncode or done.stdout:
            words_of_git = done.stderr or f"uncommitted changes:\n{done.stdout}"
            raise UsageError(f"git says of {path}: {words_of_git}Commit, or give --force to write anyway")


def _read_all(paths: Sequence[Path]) -> Iterator[FileUses | str | None]:
    """Yield what each file holds; many files are read in parallel, and a terminal shows how many are done."""
    from namedmesh.migrate.uses import read_file

    workers = cpu_count() or 1
    if len(paths) < _FEW_FILES or workers == 1:
        results = map(read_file, paths)
        yield from _with_progress(results, len(paths))
        return
    # New interpreters: a fork of a process with threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from _with_progress(pool.map(read_file, paths, chunksize=8), len(paths))


def _with_progress(results: Iterator[FileUses | str | None], total: int) -> Iterator[FileUses | str | None]:
    for number, result in enumerate(results, 1):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number} of {total} files" + ("\n" if number == total else ""))
        yield result


def report(program: Program, file_count: int, *, shows_certain: bool) -> str:
    """Return the text on every use: its replacement, or why it stays; and how many there are."""
    lines = []
    for name, reason in program.obstacles.items():
        lines.append(f"{name}: nothing is certain: {reason}.")
    if program.obstacles:
        lines += ["`namedmesh run` runs the program as it is, on a mesh.", ""]
    once: dict[str, None] = {}
    certain = 0
    total = 0
    for file in program.files:
        installs = ", ".join(f"{api.layer}.install()" for api in program.installs(file))
        for use in file.uses:
            total += 1
            advice = program.advise(use)
            once.update(dict.fromkeys(advice.once))
            where = f"{file.path}:{use.line}"
            if use.makes_groups:
                text = _describe_initialization(use.source, advice, installs)
                lines.append(f"{where}: {text}")
                continue
            is_replaced = program.is_replaced(use)
            certain += is_replaced
            if shows_certain or not is_replaced:
                doubt = f" (not certain: {advice.doubt})" if advice.doubt else ""
                lines.append(f"{where}: {use.source}{doubt} -> {advice.new or 'stays'}")
    if not total:
        return f"No use of megatron.core.parallel_state in {format_count(file_count, 'file')}.\n"
    if once:
        lines += ["", "Every rank runs once, after the mesh is made:"]
        lines += [f"    {statement}" for statement in once]
    lines += [
        "",
        f"{format_count(total, 'use')} in {format_count(file_count, 'file')}, {certain} of them certain.",
    ]
    return "\n".join(lines).lstrip("\n") + "\n"


def _describe_initialization(source: str, advice: Advice, installs: str) -> str:
    """Return the text on the call that makes the groups: it stays, and what a person can write instead."""
    behind = f" behind {installs}" if installs else ""
    doubt = f" ({advice.doubt})" if advice.doubt else ""
    return f"{source} stays{behind}; by hand{doubt} -> {advice.new}"


_SUMMARY = "list every use of Megatron's and fairscale's groups in some code, and the mesh call for each"
COMMANDS = {"migrate": (_SUMMARY, _configure, _migrate)}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
