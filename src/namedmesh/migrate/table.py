"""The migration table: every name of Megatron's ``parallel_state``, and what replaces it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from namedmesh.migrate.entries import PUBLIC
from namedmesh.migrate.private import PRIVATE
from namedmesh.migrate.rules import Advice, Arguments, Entry

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SECTIONS", "TABLE", "advise", "page", "rows"]

SECTIONS: dict[str, tuple[Entry, ...]] = {**PUBLIC, "Private names, when they are read": PRIVATE}
"""The entries, by the sections of the page."""

TABLE: dict[str, Entry] = {entry.name: entry for entries in SECTIONS.values() for entry in entries}
"""The entries, by legacy name."""


_WIDTH = 56  # of the left column; a longer call has a line of its own


def advise(legacy: str) -> Advice:
    """What replaces a legacy call or name, given as source text.

    Raises:
        KeyError: the name is not in the table.

    Example:
        >>> advise("get_data_parallel_world_size(with_context_parallel=True)").replacement
        'mesh.size("dp", "cp")'
    """
    node = ast.parse(legacy, mode="eval").body
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    entry = TABLE[name]
    arguments = Arguments.of(node, entry.parameters or ()) if isinstance(node, ast.Call) else Arguments()
    return entry.advise(arguments)


def rows(section: str) -> Iterator[tuple[str, Advice]]:
    """Each legacy call of a section, as the page shows it, and its advice.

    Example:
        >>> next((legacy, advice.replacement) for legacy, advice in rows("Groups"))
        ('get_tensor_model_parallel_group()', 'mesh.group("tp")')
    """
    for entry in SECTIONS[section]:
        for legacy in entry.legacy:
            yield legacy, advise(legacy)


def page() -> str:
    """The table as the migration page shows it: a line for each call, and numbered remarks below.

    Example:
        >>> "get_pipeline_model_parallel_next_rank()" in page()
        True
    """
    remarks: dict[str, int] = {}
    blocks = ["\n".join([section, "-" * len(section), "", *_lines(section, remarks)]) for section in SECTIONS]
    numbered = [f"[{number}] {remark}" for remark, number in remarks.items()]
    return "\n\n".join([*blocks, "\n".join(["Remarks", "-------", "", *numbered])]) + "\n"


def _lines(section: str, remarks: dict[str, int]) -> Iterator[str]:
    for legacy, advice in rows(section):
        said = [f"once: {statement}" for statement in advice.once] + list(advice.notes)
        marks = "".join(f" [{remarks.setdefault(remark, len(remarks) + 1)}]" for remark in said)
        replacement = f"{advice.replacement or 'stays'}{marks}"
        shown = f"    {legacy:<{_WIDTH}}"
        if len(legacy) > _WIDTH:
            yield shown
            shown = " " * (_WIDTH + 4)
        yield f"{shown}  {replacement}"
