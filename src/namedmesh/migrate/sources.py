"""Read Python modules, and the code cells of notebooks."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
import warnings
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SKIPPED = frozenset({"__pycache__", "build", "node_modules", "site-packages"})
_NOTEBOOK = ".ipynb"


class UnreadableError(ValueError):
    """A file that cannot be opened, decoded or parsed; it becomes a line of the report."""


@dataclass(frozen=True)
class Source:
    """The syntax tree of a file.

    Args:
        path: the path of the file, as it is shown.
        tree: its tree; of a notebook, that of all code cells one after the other.
        text: its text.
        cells: the first line of each code cell in the tree, and its number in the notebook.
    """

    path: str
    tree: ast.Module
    text: str
    cells: tuple[tuple[int, int], ...] = ()

    def locate(self, line: int) -> tuple[str, int]:
        """Return the path, with the cell of a notebook, and the line there of a line of the tree.

        Example:
            >>> Source("a.ipynb", ast.parse(""), "", ((1, 0), (4, 2))).locate(5)
            ('a.ipynb[cell 2]', 2)
        """
        if not self.cells:
            return self.path, line
        first, cell = self.cells[bisect_right(self.cells, line, key=lambda start: start[0]) - 1]
        return f"{self.path}[cell {cell}]", line - first + 1


def python_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """Yield the files of paths: a file itself, a folder's modules and notebooks; each once, sorted.

    Hidden folders are left out, and ``__pycache__``, ``build``, ``node_modules``, ``site-packages`` and virtual
    environments, unless they are given themselves.

    Example:
        >>> [path.name for path in python_files([Path(__file__).parent]) if path.name.startswith("so")]
        ['sources.py']
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
        yield from (Path(here, name) for name in sorted(files) if name.endswith((".py", _NOTEBOOK)))


def module_names(path: Path, roots: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return the names that a file can be imported by: inside its package, and from each root that it is in.

    A package's module ends in ``.__init__``.

    Example:
        >>> module_names(Path(__file__), [Path(__file__).parent])
        ('namedmesh.migrate.sources', 'sources')
    """
    top = path.parent
    while (top / "__init__.py").exists() and top != top.parent:
        top = top.parent
    folders = [top, *(Path(root) for root in roots if Path(root).is_dir() and path.is_relative_to(root))]
    return tuple(
        dict.fromkeys(".".join(path.relative_to(folder).with_suffix("").parts) for folder in folders)
    )


def fstring_quotes(text: str, line: int, column: int) -> set[str]:
    """Return the quotation marks of the f-strings around a place, given by its line and its column in bytes.

    Example:
        >>> fstring_quotes("print(f'{rank}')", 1, 9)
        {"'"}
    """
    lines = text.splitlines()
    place = (line, len(lines[line - 1].encode()[:column].decode(errors="ignore")))
    quotes: set[str] = set()
    open_strings: list[tuple[tuple[int, int], str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":  # from Python 3.12 on
            open_strings.append((token.start, token.string[-1]))
        elif kind == "FSTRING_END" or (
            kind == "STRING" and "f" in token.string.partition(token.string[-1])[0].lower()
        ):
            start, quote = open_strings.pop() if kind == "FSTRING_END" else (token.start, token.string[-1])
            if start <= place < token.end:
                quotes.add(quote)
    return quotes


def read(path: Path) -> Source:
    """Read and parse a file.

    Raises:
        UnreadableError: it cannot be opened, decoded or parsed.

    Example:
        >>> read(Path(__file__)).tree.body[0].lineno
        1
    """
    cells: tuple[tuple[int, int], ...] = ()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from None
    if path.suffix == _NOTEBOOK:
        text, cells = _code_of(content)
    else:
        try:
            text = content.decode(tokenize.detect_encoding(io.BytesIO(content).readline)[0])
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UnreadableError(f"cannot be decoded: {error}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences of the code that is read
            return Source(str(path), ast.parse(text), text, cells)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UnreadableError(f"is not Python: {line}{error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"is not Python: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _code_of(content: bytes) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Join the code of a notebook's cells, because a name is bound in one cell and used in the next."""
    try:
        sources = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(json.loads(content)["cells"])
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"is not a notebook: {_reason(error)}") from None
    lines: list[str] = []
    starts = []
    for number, source in sources:
        starts.append((len(lines) + 1, number))
        lines += _without_magic(source) or [""]
    return "\n".join(lines), tuple(starts)


def _without_magic(source: str) -> list[str]:
    """Return the lines of a cell, with the commands of the notebook replaced by ``pass``."""
    lines = source.split("\n")
    if source.lstrip().startswith("%%"):
        return [""] * len(lines)
    return [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines]
