"""``namedmesh migrate``: report uses of legacy APIs, and show or write a rewrite."""

from __future__ import annotations

import os
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

from namedmesh._command_line import existing_path
from namedmesh._errors import UsageError, format_count, get_first_line
from namedmesh.tools.migrate.aliases import find_aliases
from namedmesh.tools.migrate.program import Program
from namedmesh.tools.migrate.table import APIS, Advice
from namedmesh.tools.migrate.uses import FileUses, read_file


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
    """
    if arguments.write and not arguments.force:
        _check_clean(arguments.paths)
    modules = _parse_modules(arguments.module)
    accepted = _parse_lines(arguments.accept)
    paths, notebooks, problems = _list_files(arguments.paths)
    aliases = find_aliases(paths) | modules
    files = []
    for path in paths:
        result = read_file(path, aliases)
        if isinstance(result, str):
            problems.append(result)
        elif result is not None:
            files.append(result)
    program = Program(files, accepted, modules)
    rewrites = arguments.diff or arguments.write
    texts = []
    if rewrites:
        texts += [_rewrite_file(program, file, write=arguments.write) for file in files]
    # A rewritten use needs no line in the report: the diff shows it.
    texts.append(format_report(program, len(paths), shows_certain=not rewrites))
    if notebooks:
        texts.append(f"\n{format_count(notebooks, 'notebook')}: not read\n")
    texts += [f"{problem}\n" for problem in problems]
    return int(bool(problems)), "".join(texts)


def _list_files(given: Sequence[Path]) -> tuple[list[Path], int, list[str]]:
    """Return the files in the given folders, the number of notebooks, and problems.

    Links out of the folders are not followed: ``--write`` changes no file that was not given.
    """
    problems: list[str] = []
    # A file that is given twice, by itself and by its folder, is read once.
    paths: dict[Path, None] = {}
    notebooks = 0
    roots = [path.resolve() for path in given]
    for path in given:
        found = [path]
        if path.is_dir():
            found = []
            walk = os.walk(path, onerror=lambda error: problems.append(f"{error}: not read"))
            for folder, _, names in walk:
                found += [Path(folder, name) for name in names if name.endswith((".py", ".ipynb"))]
        for file in sorted(found):
            problem = _find_file_problem(file, roots)
            if problem:
                problems.append(f"{file}: not read: {problem}")
            elif file.suffix == ".ipynb":
                notebooks += 1
            else:
                paths[file] = None
    return list(paths), notebooks, problems


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


def _parse_modules(given: Sequence[str]) -> dict[str, str]:
    """Return upstream's module for the name of each module that was given with --module."""
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
