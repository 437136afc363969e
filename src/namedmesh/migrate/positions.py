"""Where an expression stands in the text of a file."""

from __future__ import annotations

import ast
import io
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.migrate.files import UnreadableError

if TYPE_CHECKING:
    import libcst as cst

    from namedmesh.migrate.files import Source


class Position(NamedTuple):
    """A part of a file: its first character and the one after its last; lines and columns are counted from 1.

    The quotation marks are those of the f-strings around it, the outermost first.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    quotes: tuple[str, ...] = ()


def lines_of(text: str) -> list[str]:
    r"""Return the lines of Python code, with their ends."""
    return list(io.StringIO(text, newline=""))


class Positions:
    """The positions in one file.

    Args:
        source: its code.
    """

    def __init__(self, source: Source) -> None:
        self._lines = lines_of(source.text)
        self._inside: dict[ast.JoinedStr, dict[str, list[Position]]] = {}

    def of(self, node: ast.expr, fstring: ast.JoinedStr | None = None) -> Position:
        """Return the position of a node.

        Args:
            node: an expression.
            fstring: the outermost f-string around it. Before Python 3.12 its syntax tree has no right positions, so that
                LibCST reads it; of several equal expressions in it each is returned once.

        Raises:
            UnreadableError: LibCST does not find it there.
        """
        if fstring is None:
            return self._plain(node)
        if fstring not in self._inside:
            self._inside[fstring] = self._read(self._plain(fstring))
        try:
            return self._inside[fstring][ast.unparse(node)].pop(0)
        except (KeyError, IndexError):
            raise UnreadableError(f"LibCST reads the f-string in line {fstring.lineno} otherwise") from None

    def text(self, position: Position) -> str:
        """Return the text at a position."""
        lines = self._lines[position.line - 1 : position.end_line]
        lines[-1] = lines[-1][: position.end_column - 1]
        lines[0] = lines[0][position.column - 1 :]
        return "".join(lines)

    def _plain(self, node: ast.expr) -> Position:
        last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        return Position(
            node.lineno, self._column(node.lineno, node.col_offset), last, self._column(last, end)
        )

    def _column(self, line: int, offset: int) -> int:
        """Return the column of an offset in bytes of UTF-8."""
        text = self._lines[line - 1]
        return 1 + (offset if text.isascii() else len(text.encode()[:offset].decode()))

    def _read(self, whole: Position) -> dict[str, list[Position]]:
        """Return the positions of the names and calls in an f-string, by their code."""
        import libcst as cst
        from libcst.metadata import MetadataWrapper, PositionProvider

        try:
            module = cst.parse_module(f"({self.text(whole)})")
        except cst.ParserSyntaxError:
            raise UnreadableError(f"LibCST cannot parse the f-string in line {whole.line}") from None
        places = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
        found: dict[str, list[Position]] = {}
        stack: list[tuple[cst.CSTNode, tuple[str, ...]]] = [(module, ())]
        while stack:
            node, quotes = stack.pop()
            if isinstance(node, cst.FormattedString):
                quotes = (*quotes, node.quote)
            elif quotes and isinstance(node, (cst.Name, cst.Attribute, cst.Call)):
                start, end = places[node].start, places[node].end
                # In the first line, the bracket is before it.
                first, last = (whole.column - 1 if one.line == 1 else 1 for one in (start, end))
                position = Position(
                    *(whole.line + start.line - 1, start.column + first),
                    *(whole.line + end.line - 1, end.column + last),
                    quotes,
                )
                code = ast.unparse(ast.parse(f"({module.code_for_node(node)}\n)", mode="eval"))
                found.setdefault(code, []).append(position)
            stack += [(child, quotes) for child in node.children]
        return found
