"""``namedmesh migrate``, from Megatron's and fairscale's calls to a mesh; ``pip install 'namedmesh[migrate]'``."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from namedmesh.errors import LayoutError, UsageError, count_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from namedmesh.migrate.codemod import Changes


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a module, or a folder of them")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--diff", action="store_true", help="show what --write would change, and report the rest"
    )
    text = "replace what is certain and drop imports that nothing uses any more, and report the rest; git is the backup"
    how.add_argument("--write", action="store_true", help=text)
    parser.add_argument("--force", action="store_true", help="write although git is no backup there")


def _check_clean(paths: Sequence[Path]) -> None:
    """Raise unless git has everything that could be overwritten."""
    for path in paths:
        folder = path if path.is_dir() else path.parent
        words = ["git", "-C", str(folder), "status", "--porcelain", "--", str(path.resolve())]
        done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603  our own words
        if done.returncode or done.stdout:
            said = done.stderr or f"uncommitted changes:\n{done.stdout}"
            raise UsageError(f"git says of {path}: {said}Commit, or give --force to write anyway")


def _scan(paths: Sequence[Path]) -> tuple[dict[Path, str], dict[Path, Changes], list[str]]:
    """Return the sources that may name an API, the uses in them, and a sentence for each file that cannot be read."""
    try:
        from libcst import ParserSyntaxError

        from namedmesh.migrate.codemod import MARKS, change
    except ImportError:
        raise LayoutError("namedmesh migrate needs LibCST: pip install 'namedmesh[migrate]'") from None
    texts, found, problems = dict[Path, str](), dict[Path, "Changes"](), list[str]()
    for number, path in enumerate(paths, 1):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number} of {len(paths)} files" + ("\n" if number == len(paths) else ""))
        try:
            data = path.read_bytes()
            if MARKS.search(data):
                texts[path] = data.decode("utf-8")
                found[path] = change(texts[path], rewrite=False)
        except (OSError, UnicodeDecodeError, ParserSyntaxError) as error:
            problems.append(f"{path}: cannot be read: {str(error).splitlines()[0]}")
    return texts, found, problems


def _migrate(arguments: argparse.Namespace) -> int:
    """Scan, report, and perhaps write; 1 if a file could not be read."""
    if arguments.write and not arguments.force:
        _check_clean(arguments.paths)
    sources = dict[Path, None]()
    for path in arguments.paths:
        sources |= dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path])
    texts, found, problems = _scan([*sources])
    from namedmesh.migrate.codemod import change

    open_ones = [one for changes in found.values() for one in changes.findings if one.advice.doubt]
    bound = bool(open_ones) or any(_readers(changes) for changes in found.values())
    # What files import from modules of the code itself: there, these imports stay.
    others = ("megatron", "namedmesh", "fairscale")
    imports = [one for changes in found.values() for one in changes.imports]
    kept = {one.name for one in imports if one.name and not one.module.startswith(others)}
    asked = arguments.diff or arguments.write
    for path in [path for path, changes in found.items() if changes.findings]:  # now that all files are known
        found[path] = change(texts[path], bound=bound, kept=kept, rewrite=asked)
        before, after = texts[path], found[path].after
        if arguments.write and after != before:
            path.write_bytes(after.encode("utf-8"))
            sys.stdout.write(f"{path}: rewritten\n")
        elif after != before:
            lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
            sys.stdout.write("".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}")))
    sys.stdout.write(_report(found, len(sources), certain=not asked))
    notebooks = sum(len(list(path.rglob("*.ipynb"))) for path in arguments.paths)
    if notebooks:
        sys.stdout.write(f"\n{count_of(notebooks, 'notebook')}: not read\n")
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def _readers(changes: Changes) -> list[str]:
    """Return the modules of megatron-core beside parallel_state that a file imports."""
    ours = ("megatron.core.parallel_state", "megatron.core.mpu")
    names = {".".join(one.full.split(".")[:3]) for one in changes.imports}
    return sorted(name for name in names if name.startswith("megatron.core.") and not name.startswith(ours))


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


_SUMMARY = "list every use of Megatron's and fairscale's groups in some code, and the mesh call for each"
COMMANDS = {"migrate": (_SUMMARY, _configure, _migrate)}
