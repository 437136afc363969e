"""``namedmesh migrate``: report uses of legacy APIs, and show or write a rewrite."""

from __future__ import annotations

import os
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from difflib import unified_diff
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from namedmesh.command_line import existing_path
from namedmesh.errors import MissingExtraError, UsageError, format_count, get_first_line

if TYPE_CHECKING:
    from namedmesh.migrate.program import Program
    from namedmesh.migrate.table import Advice
    from namedmesh.migrate.uses import FileUses

# Fewer files are read sooner in this process than in new ones.
_FEW_FILES = 40


def _configure(parser: ArgumentParser) -> None:
    text = "a module, or a folder of them; together all of a program"
    parser.add_argument("paths", nargs="+", metavar="PATH", type=existing_path, help=text)
    action = parser.add_mutually_exclusive_group()
    text = "show what --write changes, and report the rest"
    action.add_argument("--diff", action="store_true", help=text)
    text = (
        "install the compatibility layer where the groups are made, replace what is certain, and "
        "report the rest; git is the backup"
    )
    action.add_argument("--write", action="store_true", help=text)
    text = "a module whose names are those of an API: megatron, fairscale or ezpz; may be repeated"
    parser.add_argument("--module", action="append", default=[], metavar="NAME=API", help=text)
    text = "a line that keeps everything from being certain, which you take upon yourself; may be repeated"
    parser.add_argument("--accept", action="append", default=[], metavar="FILE:LINE", help=text)
    parser.add_argument("--force", action="store_true", help="write although git is no backup there")


def _run(arguments: Namespace) -> tuple[int, str]:
    """Read and rewrite the files.

    Returns:
        The exit status, which is 1 if a file could not be read, and the report.

    Raises:
        MissingExtraError: LibCST is not installed.
    """
    try:
        import libcst  # noqa: F401  the extra
    except ImportError:
        raise MissingExtraError(
            "LibCST is not installed; install it with: pip install 'namedmesh[migrate]'"
        ) from None
    from namedmesh.migrate.program import Program

    if arguments.write and not arguments.force:
        _check_clean(arguments.paths)
    paths, problems = _list_files(arguments.paths)
    modules = _parse_modules(arguments.module)
    aliases = _find_aliases(paths) | modules
    files = []
    for result in _read_files(paths, aliases):
        if isinstance(result, str):
            problems.append(result)
        elif result is not None:
            files.append(result)
    program = Program(files, _parse_lines(arguments.accept), modules)
    rewrites = arguments.diff or arguments.write
    texts = []
    if rewrites:
        texts += [_rewrite_file(program, file, write=arguments.write) for file in files]
    # A rewritten use needs no line in the report: the diff shows it.
    texts.append(format_report(program, len(paths), shows_certain=not rewrites))
    notebooks = len(_list_files(arguments.paths, ".ipynb")[0])
    if notebooks:
        texts.append(f"\n{format_count(notebooks, 'notebook')}: not read\n")
    texts += [f"{problem}\n" for problem in problems]
    return int(bool(problems)), "".join(texts)


def _list_files(given: Sequence[Path], suffix: str = ".py") -> tuple[list[Path], list[str]]:
    """Return the files in the given folders, each of them once, and messages about others.

    Links out of the folders are not followed: ``--write`` changes no file that was not given.
    """
    problems = []
    # A file that is given twice, by itself and by its folder, is read once.
    paths: dict[Path, None] = {}
    roots = [path.resolve() for path in given]
    for path in given:
        if not path.is_dir():
            found = [path] if suffix in {path.suffix, ".py"} else []
        else:
            found = []
            for folder, _, names in os.walk(
                path, onerror=lambda error: problems.append(f"{error}: not read")
            ):
                found += [Path(folder, name) for name in names if name.endswith(suffix)]
        for file in sorted(found):
            problem = _find_file_problem(file, roots)
            if problem:
                problems.append(f"{file}: not read: {problem}")
            else:
                paths[file] = None
    return list(paths), problems


def _find_file_problem(file: Path, roots: Sequence[Path]) -> str:
    """Return why a file is not read; empty if it is."""
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a link to itself is a RuntimeError up to Python 3.12
        return get_first_line(error)
    if file.is_symlink() and not any(target.is_relative_to(root) for root in roots):
        return f"a link to {target}, which was not given"
    # A named pipe would wait for its writer.
    return "" if target.is_file() else "not a regular file"


def _find_aliases(paths: Sequence[Path]) -> dict[str, str]:
    """Return the legacy names that modules of the program re-export, by their qualified names."""
    from namedmesh.migrate.table import API_OF_MODULE
    from namedmesh.migrate.uses import read_aliases, resolve

    aliases: dict[str, str] = {}
    ambiguous: set[str] = set()
    for path in paths:
        for name, target in read_aliases(path).items():
            if aliases.setdefault(name, target) != target:
                ambiguous.add(name)
    for name in ambiguous:
        del aliases[name]
    legacy = {}
    starts = tuple(f"{module}." for module in API_OF_MODULE)
    for name in aliases:
        target = resolve(name, aliases)
        # A name without its module would stand for every name like it.
        if "." in name and f"{target}.".startswith(starts):
            legacy[name] = target
    return legacy


def _parse_modules(given: Sequence[str]) -> dict[str, str]:
    """Return upstream's module for the name of each module that was given with --module."""
    from namedmesh.migrate.table import APIS

    modules = {api.name.lower(): api.modules[0] for api in APIS}
    aliases = {}
    for text in given:
        name, _, api = text.partition("=")
        if not name or api.lower() not in modules:
            raise UsageError(f"--module {text} is not NAME=API, with one of the APIs {', '.join(modules)}")
        aliases[name] = modules[api.lower()]
    return aliases


def _parse_lines(given: Sequence[str]) -> set[tuple[Path, int]]:
    """Return the files and lines that were given with --accept."""
    lines = set()
    for text in given:
        path, _, line = text.rpartition(":")
        if not path or not line.isdecimal():
            raise UsageError(f"--accept {text} is not FILE:LINE, as in the first line of the report")
        lines.add((Path(path).resolve(), int(line)))
    return lines


def _rewrite_file(program: Program, file: FileUses, *, write: bool) -> str:
    """Write the new source of a file, and return the text that says so, or the difference."""
    after = program.rewrite(file)
    if after == file.source:
        return ""
    if write:
        # Bytes, as line ends and encodings of the rest of the file stay as they are.
        try:
            file.path.write_bytes(after)
        except OSError as error:
            # The report must still say which files are rewritten.
            return f"{file.path}: cannot be written: {get_first_line(error)}\n"
        return f"{file.path}: rewritten\n"
    before_lines = file.source.decode().splitlines(keepends=True)
    after_lines = after.decode().splitlines(keepends=True)
    return "".join(unified_diff(before_lines, after_lines, f"a/{file.path}", f"b/{file.path}"))


def _check_clean(paths: Sequence[Path]) -> None:
    """Raise a UsageError unless git has everything that could be overwritten."""
    for path in paths:
        folder = path if path.is_dir() else path.parent
        command = ["git", "-C", str(folder), "status", "--porcelain", "--", str(path.resolve())]
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603  our own words
        if done.returncode or done.stdout:
            # git reports on stderr if this is no repository, and lists uncommitted changes on
            # stdout.
            reason = done.stderr or f"uncommitted changes:\n{done.stdout}"
            raise UsageError(f"git says of {path}: {reason}Commit, or give --force to write anyway")


def _read_files(paths: Sequence[Path], aliases: Mapping[str, str]) -> Iterator[FileUses | str | None]:
    """Yield the result of :func:`read_file` for each file; many files are read in parallel."""
    from namedmesh.migrate.uses import read_file

    read = partial(read_file, aliases=aliases)
    workers = os.cpu_count() or 1
    if len(paths) < _FEW_FILES or workers == 1:
        yield from map(read, paths)
        return
    # New interpreters: a fork of a process with threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(read, paths, chunksize=8)


def format_report(program: Program, file_count: int, *, shows_certain: bool) -> str:
    """Format every use with its replacement or the reason why it stays.

    Args:
        program: the uses.
        file_count: the number of files that were read.
        shows_certain: whether to list the uses that a rewrite replaces, too.
    """
    lines = [f"{name}: nothing is certain: {reason}." for name, reason in program.obstacles.items()]
    if lines:
        lines += ["`namedmesh run` runs the program as it is, on the groups of a mesh if they fit.", ""]
    # A dict keeps the statements in order, each of them once.
    once: dict[str, None] = {}
    certain = 0
    total = 0
    for file in program.files:
        for use in file.uses:
            total += 1
            advice = program.advise(use)
            once.update(dict.fromkeys(advice.once))
            is_replaced = program.is_replaced(use)
            certain += is_replaced
            if use.makes_groups:
                text = _describe_initialization(program, file, use.source, advice)
            elif shows_certain or not is_replaced:
                doubt = f" (not certain: {advice.doubt})" if advice.doubt else ""
                text = f"{use.source}{doubt} -> {advice.new or 'stays'}"
            else:
                continue
            lines.append(f"{file.path}:{use.line}: {text}")
    if not total:
        return f"No use of megatron.core.parallel_state in {format_count(file_count, 'file')}.\n"
    # Such statements communicate, so they cannot be written where one rank may ask.
    if once:
        lines += ["", "Every rank runs once, after the mesh is made:"]
        lines += [f"    {statement}" for statement in once]
    lines += [
        "",
        f"{format_count(total, 'use')} in {format_count(file_count, 'file')}, {certain} of them certain.",
    ]
    return "\n".join(lines).lstrip("\n") + "\n"


def _describe_initialization(program: Program, file: FileUses, source: str, advice: Advice) -> str:
    """Describe the call that makes the groups: it stays; the advice is for a rewrite by hand."""
    text = f"{source} stays"
    layers = program.list_missing_layers(file)
    if layers:
        text += f" behind {', '.join(map(program.format_install, layers))}"
    text += "; by hand"
    if advice.doubt:
        text += f" ({advice.doubt})"
    return f"{text} -> {advice.new}"


_SUMMARY = "list every use of Megatron's and fairscale's groups in some code, and the mesh call for each"
COMMANDS = {"migrate": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
