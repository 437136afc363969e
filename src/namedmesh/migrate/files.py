"""Find and read Python modules, and the code cells of notebooks."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import stat
import tokenize
import warnings
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SKIPPED = frozenset({"__pycache__", "build", "node_modules", "site-packages"})
_NOTEBOOK = ".ipynb"
TOO_DEEP = "is nested too deeply"
_PACKAGES = ("megatron", "fairscale")


class UnreadableError(ValueError):
    """A file that cannot be opened, decoded or parsed; it becomes a line of the report."""


@dataclass(frozen=True)
class Source:
    """The code of a file."""

    path: str  # as it is shown
    code: bytes  # of a notebook, all code cells one after the other
    cells: tuple[
        tuple[int, int], ...
    ] = ()  # each code cell's first line in the code, and its number in the notebook

    @cached_property
    def text(self) -> str:
        """The code as text, without a byte order mark; an UnreadableError if it cannot be decoded."""
        try:
            return self.code.decode(self.encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            raise UnreadableError(f"cannot be decoded: {error}") from None

    @property
    def encoding(self) -> str:
        """The encoding that the code declares."""
        return tokenize.detect_encoding(io.BytesIO(self.code).readline)[0]

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text where Python ends them, with their ends."""
        return list(io.StringIO(self.text, newline=""))

    def span(self, node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the line and column of a node's first character, and of the one after its last, from 1."""
        given = cast("ast.expr", node)
        end_line, end_offset = given.end_lineno or given.lineno, given.end_col_offset or 0
        return self._place(given.lineno, given.col_offset), self._place(end_line, end_offset)

    def _place(self, line: int, offset: int) -> tuple[int, int]:
        """Return the line and column of an offset in bytes of UTF-8."""
        text = self.lines[line - 1]
        return line, 1 + (offset if text.isascii() else len(text.encode()[:offset].decode()))

    def between(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        """Return the text between two places."""
        lines = self.lines[start[0] - 1 : end[0]]
        lines[-1] = lines[-1][: end[1] - 1]
        lines[0] = lines[0][start[1] - 1 :]
        return "".join(lines)

    def locate(self, line: int) -> tuple[str, int]:
        """Return the path, with the cell of a notebook, and the line there of a line of the code."""
        if not self.cells:
            return self.path, line
        first, cell = self.cells[bisect_right(self.cells, line, key=lambda start: start[0]) - 1]
        return f"{self.path}[cell {cell}]", line - first + 1


def python_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """Yield the files of paths, each once, sorted: of a folder its modules and notebooks, but not those in hidden or skipped folders."""
    seen: set[str] = set()
    for given in map(Path, paths):
        for path in _walk(given) if given.is_dir() else (given,):
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                yield path


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not Path(here, name, "pyvenv.cfg").exists()
        )
        yield from (Path(here, name) for name in sorted(files) if name.endswith((".py", _NOTEBOOK)))


def key_of(path: Path) -> str:
    """Return a dotted name that only this file has: its absolute path."""
    parts = [part.replace(".", "_") for part in path.absolute().with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_names(path: Path, roots: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the names that a file may be imported by: from its package's folder, and from each folder up to a root."""
    path = path.absolute()
    top = path.parent
    while (top / "__init__.py").exists() and top != top.parent:
        top = top.parent
    folders = {top}
    for root in (Path(root).absolute() for root in roots):
        if top.is_relative_to(root) and root.is_dir():
            folders |= {folder for folder in (top, *top.parents) if folder.is_relative_to(root)}
    folders |= {folder.parent for folder in path.parents if folder.name in _PACKAGES}
    names = (
        ".".join(path.relative_to(folder).with_suffix("").parts) for folder in sorted(folders, reverse=True)
    )
    return [name.removesuffix(".__init__") for name in names]


def read(path: Path) -> Source:
    """Read a file, of a notebook its code cells; an UnreadableError if it cannot be opened, or is no notebook."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe can take for ever
            raise UnreadableError("is not a file")
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from None
    if path.suffix == _NOTEBOOK:
        return Source(str(path), *_code_of(content))
    return Source(str(path), content)


def parse(source: Source) -> ast.Module:
    """Parse some code; an UnreadableError if it cannot be decoded, or is not Python."""
    _ = source.text  # of what cannot be decoded, Python reads some
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences of the code that is read
            return ast.parse(source.code)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UnreadableError(f"is not Python: {line}{error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"is not Python: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _code_of(content: bytes) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Join the code of a notebook's cells, because a name is bound in one cell and used in the next."""
    try:
        sources = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(json.loads(content)["cells"])
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableError(f"is not a notebook: {_reason(error)}") from None
    lines: list[str] = []
    starts = []
    for number, source in sources:
        starts.append((len(lines) + 1, number))
        lines += _without_magic(source) or [""]
    return "\n".join(lines).encode(), tuple(starts)


def _without_magic(source: str) -> list[str]:
    """Return the lines of a cell, with the commands of the notebook replaced by ``pass``."""
    lines = source.split("\n")
    if source.lstrip().startswith("%%"):
        return [""] * len(lines)
    return [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines]
