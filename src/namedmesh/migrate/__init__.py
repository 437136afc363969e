"""``namedmesh migrate``, from Megatron's and fairscale's calls to a mesh; ``pip install 'namedmesh[migrate]'``.

Here is the table of the calls: rows as data, each of which a test runs beside the original. ``mesh`` stands for the mesh,
``{axes}`` for the axes that the flags of a call choose. ``codemod`` finds them in files.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from namedmesh.axes import EXPERT_AXES
from namedmesh.dialects import DIALECTS, GroupSpec
from namedmesh.errors import LayoutError

Arguments: TypeAlias = Sequence[tuple[str, str]]
"""Each a keyword, which may be empty, and its source."""

_EXPERT_VIEW = 'mesh.add_view("expert", pp=mesh.size("pp"), edp=-1, ep=expert_model_parallel_size, etp=expert_tensor_parallel_size)'


class Advice(NamedTuple):
    """What replaces one use: an expression, what every rank runs once before it, and why it is not certain, if it is not."""

    new: str
    once: tuple[str, ...] = ()
    doubt: str = ""


class Row(NamedTuple):
    """One legacy name that a mesh answers."""

    new: str  # the expression that replaces it
    axes: dict[tuple[str, ...], tuple[str, ...]]  # by the flags that choose them
    parameters: tuple[str, ...] = ()  # that are given by position, in their order

    def advise(self, arguments: Arguments = ()) -> Advice:
        """Return what replaces a call with some arguments.

        Example:
            >>> MEGATRON["get_data_parallel_rank"].advise([("", "True")])
            Advice(new='mesh.rank("dp", "cp")', once=(), doubt='')
        """
        given, doubt = unusual(arguments, self.parameters), ""
        axes = self.axes.get(tuple(given))
        if axes is None or {*given.values()} - {"True"}:
            axes, doubt = self.axes[()], f"what {' and '.join(given)} is decides it"
        once = [_EXPERT_VIEW] if {*EXPERT_AXES} & {*axes} else []
        quoted = ", ".join(f'"{axis}"' for axis in axes)
        if "group(" in self.new and len(axes) > 1:
            once.append(f"mesh.flatten({quoted})")
        if once and not doubt:
            doubt = "run once before, on every rank"
        return Advice(self.new.format(axes=quoted), tuple(once), doubt)


def unusual(arguments: Arguments, parameters: Sequence[str]) -> dict[str, str]:
    """Return the arguments that are not as usual by the names of their parameters; ``*`` and ``**`` under that name."""
    found = {}
    for place, (keyword, source) in enumerate(arguments):
        name = keyword or (parameters[place] if place < len(parameters) else f"argument {place + 1}")
        if source not in {"None", str(name in _USUALLY_TRUE)}:
            found[name] = source
    return found


_CHECK, _WITH_CP, _STAGE = ("check_initialized",), ("with_context_parallel",), ("ignore_virtual", "vp_stage")
_USUALLY_TRUE = {"check_initialized", "ignore_virtual"}  # every other flag is usually false
_OF_GROUPS = {
    "get_{}_group": ("mesh.group({axes})", _CHECK + _WITH_CP),
    "get_{}_world_size": ("mesh.size({axes})", _WITH_CP),
    "get_{}_rank": ("mesh.rank({axes})", _WITH_CP),
    "get_{}_src_rank": ("mesh.ranks({axes})[0]", _WITH_CP),
    "get_{}_ranks": ("list(mesh.ranks({axes}))", ()),
    "get_{}_global_ranks": ("list(mesh.ranks({axes}))", _CHECK),
}


def _table(groups: Sequence[GroupSpec], suffix: str = "") -> dict[str, Row]:
    """Return the rows of the groups of a dialect: what asks for them, by its flags, and their private variables."""
    table = {"destroy_model_parallel": Row("mesh.close()", {(): ()})}
    for group in [one for one in groups if one.members == "all"]:
        name, *flags = (group.name + suffix).split()
        for asks, (new, parameters) in _OF_GROUPS.items():
            row = table.setdefault(asks.format(name), Row(new, {}, parameters))
            row.axes[tuple(flags)] = group.axes
        table[group.variable] = Row("mesh.group({axes})", {(): group.axes})
        if group.ranks:
            table[group.ranks] = Row("list(mesh.ranks({axes}))", {(): group.axes})
    return table


MEGATRON = _table(DIALECTS["megatron"].kinds) | {
    "get_pipeline_model_parallel_first_rank": Row('mesh.ranks("pp")[0]', {(): ()}),
    "get_pipeline_model_parallel_last_rank": Row('mesh.ranks("pp")[-1]', {(): ()}),
    "get_pipeline_model_parallel_next_rank": Row('mesh.next("pp")', {(): ()}),
    "get_pipeline_model_parallel_prev_rank": Row('mesh.prev("pp")', {(): ()}),
    "is_pipeline_first_stage": Row('mesh.is_first("pp")', {(): ()}, _STAGE),
    "is_pipeline_last_stage": Row('mesh.is_last("pp")', {(): ()}, _STAGE),
}
"""The names of Megatron's ``parallel_state``. What is not here stays."""
MEGATRON["get_data_parallel_group"] = MEGATRON["get_data_parallel_group"]._replace(parameters=_WITH_CP)
FAIRSCALE = _table(DIALECTS["fairscale"].kinds, "_parallel")
"""The names of fairscale's ``nn.model_parallel.initialize``."""

_MEGATRONS = ("megatron.core.parallel_state", "megatron.core.mpu", "namedmesh.compat.megatron.parallel_state")
_FAIRSCALE = "fairscale.nn.model_parallel"
_FAIRSCALES = (f"{_FAIRSCALE}.initialize", _FAIRSCALE, "namedmesh.compat.fairscale")
APIS = dict.fromkeys(_MEGATRONS, MEGATRON) | dict.fromkeys(_FAIRSCALES, FAIRSCALE)
"""The tables by the modules that have these names."""

# The sizes that initialize_model_parallel takes, in the order of the mesh; others are of the experts, or make no other groups.
_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_SIZES = {"pp": _PP, "dp": "", "cp": "context_parallel_size", "tp": _TP}
_FAIRSCALE_SIZES = {"dp": "", "pp": "pipeline_length", "tp": "model_parallel_size_"}


def initialize(module: str, arguments: Arguments, *, bound: bool = False) -> Advice:
    """Return the mesh that replaces ``initialize_model_parallel``; bound to Megatron where others still read it.

    Example:
        >>> initialize("megatron.core.parallel_state", [("", "2"), ("", "4")]).new
        'namedmesh.init_mesh(pp=4, dp=-1, cp=1, tp=2)'
    """
    fairscale = "fairscale" in module
    sizes, once, doubts = _FAIRSCALE_SIZES if fairscale else _SIZES, list[str](), list[str]()
    given = unusual(arguments, (sizes["tp"], sizes["pp"], _VIRTUAL))
    written = {axis: given.pop(name, "1") if name else "-1" for axis, name in sizes.items()}
    if _EP in given or _ETP in given:
        ep, etp = given.pop(_EP, "1"), given.pop(_ETP, written["tp"])
        once.append(_EXPERT_VIEW.replace(_EP, ep).replace(_ETP, etp))
        doubts.append("run once after it, on every rank")
    others = [name for name in given if name not in {_VIRTUAL, "create_gloo_process_groups"}]
    if others:
        doubts.append(f"what {', '.join(others)} asks for is missing here")
    new = f"namedmesh.init_mesh({', '.join(f'{axis}={size}' for axis, size in written.items())})"
    if bound and not fairscale:
        new = f"namedmesh.compat.megatron.bind({new})"
    return Advice(new, tuple(once), "; ".join(doubts))


def advise(module: str, leaf: str, arguments: Arguments, *, bound: bool = False) -> Advice | None:
    """Return what replaces a call of a name of a module, or its value; None for names that are none of an API."""
    table = APIS.get(module)
    if table is None:  # a name that only a module of the code itself can hand on
        table = MEGATRON | FAIRSCALE if "parallel" in leaf.lower() else {}
    if leaf == "initialize_model_parallel":
        return initialize(module, arguments, bound=bound)
    if leaf in table:
        return table[leaf].advise(arguments)
    known = module in APIS and f"{module}.{leaf}" not in APIS
    return Advice("", doubt="not in the table: it stays") if known else None


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a module, or a folder of them")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--diff", action="store_true", help="show what --write changes, and report the rest")
    text = "replace what is certain and drop imports that nothing uses any more, and report the rest; git is the backup"
    how.add_argument("--write", action="store_true", help=text)
    parser.add_argument("--force", action="store_true", help="write although git is no backup there")


def _migrate(arguments: Namespace) -> int:
    try:
        from namedmesh.migrate.codemod import migrate
    except ImportError:
        raise LayoutError("namedmesh migrate needs LibCST: pip install 'namedmesh[migrate]'") from None
    return migrate(arguments)


_SUMMARY = "list every use of Megatron's and fairscale's groups in some code, and the mesh call for each"
COMMANDS = {"migrate": (_SUMMARY, _configure, _migrate)}
