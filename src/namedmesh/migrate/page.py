"""The page of the migration: the table of Megatron as text."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from namedmesh.migrate.table import SECTIONS, TABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from namedmesh.migrate.rules import Advice

# Slots of other libraries, which take a group of a mesh.
_ELSEWHERE = {
    "deepspeed.utils.groups": "namedmesh.compat.deepspeed.groups.bind(mesh)",
    "torchtitan ParallelDims(...)": "namedmesh.compat.torchtitan.ParallelDims.bind(mesh)",
    "verl.utils.ulysses": 'set_ulysses_sequence_parallel_group(mesh.group("sp"))',
    "yunchang.globals, Ulysses": 'PROCESS_GROUP.ULYSSES_PG = mesh.group("sp")',
    "yunchang.globals, ring attention": 'PROCESS_GROUP.RING_PG = mesh.group("cp")',
}

_WIDTH = 56  # of the left column; a longer call has a line of its own


def advise(legacy: str) -> Advice:
    """Return the code that replaces a legacy call or name of Megatron, given as source text.

    Raises:
        KeyError: the name is not in the table.

    Example:
        >>> advise("get_data_parallel_world_size(with_context_parallel=True)").replacement
        'mesh.size("dp", "cp")'
    """
    node = ast.parse(legacy, mode="eval").body
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return TABLE[name].advise(node)


def rows(section: str) -> Iterator[tuple[str, Advice]]:
    """Yield each legacy call of a section, as the page shows it, and its advice."""
    for row in SECTIONS[section]:
        for legacy in row.calls():
            yield legacy, advise(legacy)


def page() -> str:
    """Write the table: a line for each call, and numbered remarks below.

    Example:
        >>> "get_pipeline_model_parallel_next_rank()" in page()
        True
    """
    remarks: dict[str, int] = {}
    blocks = ["\n".join([section, "-" * len(section), "", *_lines(section, remarks)]) for section in SECTIONS]
    elsewhere = [f"    {slot:<{_WIDTH}}  {code}" for slot, code in _ELSEWHERE.items()]
    blocks.append("\n".join(["Other libraries", "---------------", "", *elsewhere]))
    numbered = [f"[{number}] {remark}" for remark, number in remarks.items()]
    return "\n\n".join([*blocks, "\n".join(["Remarks", "-------", "", *numbered])]) + "\n"


def _lines(section: str, remarks: dict[str, int]) -> Iterator[str]:
    for legacy, advice in rows(section):
        notes = [f"once: {statement}" for statement in advice.once] + list(advice.notes)
        marks = "".join(f" [{remarks.setdefault(note, len(remarks) + 1)}]" for note in notes)
        call = f"    {legacy:<{_WIDTH}}"
        if len(legacy) > _WIDTH:
            yield call
            call = " " * (_WIDTH + 4)
        yield f"{call}  {advice.replacement or 'stays'}{marks}"
