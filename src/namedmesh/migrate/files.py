"""Which files to read, and how: Python modules, and the code cells of notebooks."""

from __future__ import annotations

import ast
import io
import json
import os
import tokenize
import warnings
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Source", "Unreadable", "python_files", "read"]

_SKIPPED = frozenset({"__pycache__", "build", "node_modules", "site-packages"})
_NOTEBOOK = ".ipynb"


class Unreadable(ValueError):  # noqa: N818  it is caught here, and becomes a line of the report
    """A file that cannot be read, decoded or parsed; the text says why."""


@dataclass(frozen=True)
class Source:
    """The syntax tree of a file.

    Args:
        path: the path of the file, as it is shown.
        tree: its tree; of a notebook, that of all code cells one after the other.
        text: its text, for a quick look at what it can contain at all.
        cells: the first line of each code cell in the tree, and its number in the notebook.
    """

    path: str
    tree: ast.Module
    text: str
    cells: tuple[tuple[int, int], ...] = ()

    def place(self, line: int) -> tuple[str, int]:
        """Where a line of the tree is: the path, with the cell of a notebook, and the line there.

        Example:
            >>> Source("a.ipynb", ast.parse(""), "", ((1, 0), (4, 2))).place(5)
            ('a.ipynb[cell 2]', 2)
        """
        if not self.cells:
            return self.path, line
        first, cell = self.cells[bisect_right(self.cells, line, key=lambda one: one[0]) - 1]
        return f"{self.path}[cell {cell}]", line - first + 1


def python_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """The files that paths stand for: a file itself, a folder's modules and notebooks; each once, sorted.

    Hidden folders are left out, and ``__pycache__``, ``build``, ``node_modules``, ``site-packages`` and virtual
    environments, unless they are what was asked for.

    Example:
        >>> [path.name for path in python_files([Path(__file__).parent]) if path.name.startswith("f")]
        ['files.py']
    """
    seen: set[Path] = set()
    for given in map(Path, paths):
        for path in _walk(given) if given.is_dir() else (given,):
            resolved = path.resolve()
            if resolved not in seen:
                seen.add(resolved)
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
        for name in sorted(files):
            if name.endswith((".py", _NOTEBOOK)):
                yield Path(here, name)


def read(path: Path) -> Source:
    """The source of a file.

    Raises:
        Unreadable: it cannot be opened, decoded or parsed.

    Example:
        >>> read(Path(__file__)).tree.body[0].lineno
        1
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    if path.suffix == _NOTEBOOK:
        code, cells = _code_of(content)
        return Source(str(path), _parsed(code), code, cells)
    text = _decoded(content)
    return Source(str(path), _parsed(text), text)


def _decoded(content: bytes) -> str:
    """The text of a module, by its mark or its coding line; UTF-8 without either."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot be decoded: {error}") from None


def _parsed(code: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about somebody else's escape sequences
            return ast.parse(code)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise Unreadable(f"is not Python: {where}{error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"is not Python: {_why(error)}") from None


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _code_of(content: bytes) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The code of a notebook's cells as one text, because a name is bound in one cell and used in the next."""
    try:
        cells: list[Any] = json.loads(content)["cells"]
        sources = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(cells)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"is not a notebook: {_why(error)}") from None
    lines: list[str] = []
    places = []
    for number, source in sources:
        places.append((len(lines) + 1, number))
        lines += _without_magic(source) or [""]
    return "\n".join(lines), tuple(places)


def _without_magic(source: str) -> list[str]:
    """The lines of a cell, with what only a notebook understands made harmless."""
    lines = source.split("\n")
    if source.lstrip().startswith("%%"):
        return [""] * len(lines)
    return [
        line[: len(line) - len(line.lstrip())] + "pass" if line.lstrip().startswith(("%", "!")) else line
        for line in lines
    ]
