"""The command ``namedmesh migrate``: what it reads, prints and writes."""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, UsageError, count_of

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Sequence

    from namedmesh.migrate.codemod import Changes


def _configure(parser: argparse.ArgumentParser) -> None:
    text = "a module, or a folder of them"
    parser.add_argument("paths", nargs="+", metavar="PATH", type=_existing, help=text)
    how = parser.add_mutually_exclusive_group()
    text = "show what --write would change, and report the rest"
    how.add_argument("--diff", action="store_true", help=text)
    text = "replace what is certain and drop imports that nothing uses any more, and report the rest; git is the backup"
    how.add_argument("--write", action="store_true", help=text)
    text = "write although git has uncommitted changes there, or no git is there"
    parser.add_argument("--force", action="store_true", help=text)


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {path!r}")
    return Path(path)


def _check_clean(paths: Sequence[Path]) -> None:
    """Raise unless git has everything that could be overwritten."""
    for path in paths:
        folder = path if path.is_dir() else path.parent
        words = ["git", "-C", str(folder), "status", "--porcelain", "--", str(path.resolve())]
        done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603  our own words
        if done.returncode or done.stdout:
            found = "is in no git repository" if done.returncode else "has uncommitted changes"
            raise UsageError(f"{str(path)!r} {found}; commit, or give --force to write anyway")


def _migrate(arguments: argparse.Namespace) -> int:
    """Scan, report, and perhaps write; 1 if a file could not be read."""
    try:
        from libcst import ParserSyntaxError

        from namedmesh.migrate import codemod
    except ImportError:
        raise LayoutError("namedmesh migrate needs LibCST: pip install 'namedmesh[migrate]'") from None
    if arguments.write and not arguments.force:
        _check_clean(arguments.paths)
    sources: dict[Path, None] = {}
    for path in arguments.paths:
        sources |= dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path])
    texts, problems = _texts(sources, codemod.MARKS)
    found: dict[Path, Changes] = {}
    for number, (path, text) in enumerate(texts.items(), 1):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number} of {len(texts)} files" + ("\n" if number == len(texts) else ""))
        try:
            found[path] = codemod.change(text, rewrite=False)
        except ParserSyntaxError as error:
            problems.append(f"{path}: cannot be read: {str(error).splitlines()[0]}")
    open_ones = [one for changes in found.values() for one in changes.findings if one.advice.doubt]
    bound = bool(open_ones) or any(_readers(changes) for changes in found.values())
    kept = _handed_on(found.values())
    asked = arguments.diff or arguments.write
    for path in [path for path, changes in found.items() if changes.findings]:  # now that all files are known
        found[path] = codemod.change(texts[path], bound=bound, kept=kept, rewrite=asked)
        if found[path].after != texts[path]:
            _changed(path, texts[path], found[path].after, write=arguments.write)
    sys.stdout.write(_report(found, len(sources), certain=not asked))
    notebooks = sum(len(list(path.rglob("*.ipynb"))) for path in arguments.paths)
    if notebooks:
        sys.stdout.write(f"\n{count_of(notebooks, 'notebook')}: not read\n")
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def _texts(paths: Iterable[Path], marks: re.Pattern[bytes]) -> tuple[dict[Path, str], list[str]]:
    """Return the texts of the files that may name an API, and a sentence for each that cannot be read."""
    texts, problems = dict[Path, str](), list[str]()
    for path in paths:
        try:
            data = path.read_bytes()
            if marks.search(data):
                texts[path] = data.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:  # noqa: PERF203  the others are read
            problems.append(f"{path}: cannot be read: {error}")
    return texts, problems


def _changed(path: Path, before: str, after: str, *, write: bool) -> None:
    if write:
        path.write_bytes(after.encode("utf-8"))
        sys.stdout.write(f"{path}: rewritten\n")
    else:
        lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
        sys.stdout.write("".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}")))


def _readers(changes: Changes) -> list[str]:
    """Return the modules of megatron-core beside parallel_state that a file imports."""
    ours = ("megatron.core.parallel_state", "megatron.core.mpu")
    names = {".".join(one.full.split(".")[:3]) for one in changes.imports}
    return sorted(name for name in names if name.startswith("megatron.core.") and not name.startswith(ours))


def _handed_on(each: Iterable[Changes]) -> set[str]:
    """Return the names that files import from modules of the code itself: there, their imports stay."""
    others = ("megatron", "namedmesh", "fairscale")
    imports = [one for changes in each for one in changes.imports]
    return {one.name for one in imports if one.name and not one.module.startswith(others)}


def _report(found: dict[Path, Changes], files: int, *, certain: bool) -> str:
    """Write what replaces each use, what runs once, and how many there are."""
    lines, once, count, sure = list[str](), dict[str, None](), 0, 0
    for path, changes in found.items():
        for line, old, advice in sorted(changes.findings, key=lambda finding: finding.line):
            count, sure = count + 1, sure + (not advice.doubt)
            once |= dict.fromkeys(advice.once)
            if certain or advice.doubt:
                doubt = f" (not certain: {advice.doubt})" if advice.doubt else ""
                lines.append(f"{path}:{line}: {old}{doubt} -> {advice.new or 'stays'}")
    if once:
        lines += ["", "Once, on every rank, after init_mesh:", *(f"    {statement}" for statement in once)]
    readers = [f"    {path}: {', '.join(_readers(one))}" for path, one in found.items() if _readers(one)]
    if not count and not readers:
        return f"No use of megatron.core.parallel_state in {count_of(files, 'file')}.\n"
    if count:
        lines += ["", f"{count_of(count, 'use')} in {count_of(files, 'file')}, {sure} of them certain."]
    if readers:
        text = "These modules of megatron-core read parallel_state: keep the mesh bound to Megatron."
        lines += ["", text, *readers]
    return "\n".join(lines).lstrip("\n") + "\n"


COMMANDS = {
    "migrate": (
        "list every use of Megatron's and fairscale's groups in some code, and the mesh call for each",
        _configure,
        _migrate,
    )
}
"""The summary of the command, the function that declares its arguments, and the one that runs it."""
