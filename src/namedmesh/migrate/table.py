"""The calls of Megatron's ``parallel_state`` and fairscale's ``initialize``, and the mesh call for each: rows as data.

``mesh`` stands for the mesh; ``{axes}`` for the axes that the flags of a call choose. A test runs every row beside the original.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from namedmesh.dialects import MEGATRON_GROUPS, parse_order

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXPERT_AXES = {"ep", "etp", "edp"}
_EXPERT_VIEW = 'mesh.add_view("expert", pp=mesh.size("pp"), edp=-1, ep=expert_model_parallel_size, etp=expert_tensor_parallel_size)'

ByFlags = dict[tuple[str, ...], tuple[str, ...]]
Arguments: TypeAlias = "Sequence[tuple[str, str]]"  # each a keyword, which may be empty, and its source


class Advice(NamedTuple):
    """What replaces one use: an expression, what every rank runs once before it, and why it is not certain, if it is not."""

    new: str
    once: tuple[str, ...] = ()
    doubt: str = ""


class Row(NamedTuple):
    """One legacy name."""

    new: str  # the expression that replaces it, or nothing where it stays
    axes: ByFlags  # that its flags choose
    parameters: tuple[str, ...] = ()  # in their order
    doubt: str = ""  # why the replacement is not certain, if it is not

    def advise(self, arguments: Sequence[tuple[str, str]] = ()) -> Advice:
        """Return what replaces a call with some arguments, each a keyword, which may be empty, and its source.

        Example:
            >>> MEGATRON["get_data_parallel_rank"].advise([("", "True")])
            Advice(new='mesh.rank("dp", "cp")', once=(), doubt='')
        """
        literals = {name: _literal(source) for name, source in named(arguments, self.parameters).items()}
        flags = [name for name in self.parameters if name not in _USUALLY_TRUE]
        true = tuple(name for name in flags if literals.get(name) is True)
        axes, doubt = self.axes.get(true, self.axes[()]), self.doubt
        if true not in self.axes:
            doubt = f"{' and '.join(true)}: a group that needs a view of its own"
        for name, value in literals.items():
            if name not in self.parameters or not isinstance(value, bool):
                doubt = f"what {name} is decides it"
            elif name in _USUALLY_TRUE and value is not True:
                doubt = f"a mesh has nothing like {name}=False"
        once = [_EXPERT_VIEW] if _EXPERT_AXES & {*axes} else []
        quoted = ", ".join(f'"{axis}"' for axis in axes)
        if "group(" in self.new and len(axes) > 1:
            once.append(f"mesh.flatten({quoted})")
        if once and not doubt:
            doubt = "run once before, on every rank"
        return Advice(self.new.format(axes=quoted), tuple(once), doubt)


def named(arguments: Sequence[tuple[str, str]], parameters: Sequence[str]) -> dict[str, str]:
    """Return the sources of arguments by the names of their parameters; ``*`` and ``**`` under that name."""
    found = {}
    for place, (name, source) in enumerate(arguments):
        by_place = parameters[place] if place < len(parameters) else f"argument {place + 1}"
        found[name or by_place] = source
    return found


def _literal(source: str) -> object:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return source


def _over(*axes: str) -> ByFlags:
    return {(): axes}


def _group(name: str, *axes: str) -> dict[str, Row]:
    """Return the rows of a group, its size and a rank's place in it."""
    return {
        f"get_{name}_group": Row("mesh.group({axes})", _over(*axes), _CHECK),
        f"get_{name}_world_size": Row("mesh.size({axes})", _over(*axes)),
        f"get_{name}_rank": Row("mesh.rank({axes})", _over(*axes)),
    }


_CHECK, _WITH_CP, _STAGE = ("check_initialized",), ("with_context_parallel",), ("ignore_virtual", "vp_stage")
_USUALLY_TRUE = {"check_initialized", "ignore_virtual"}
_DATA, _PARTIAL = (*_WITH_CP, "partial_data_parallel"), ("partial_expert_data_parallel",)
_CP: ByFlags = {(): ("dp",), _WITH_CP: ("dp", "cp")}
_TP: ByFlags = {(): ("dp", "tp"), _WITH_CP: ("dp", "cp", "tp")}
_AMAX = _TP | {("tp_only_amax_red",): ("tp",), (*_WITH_CP, "tp_only_amax_red"): ("cp", "tp")}
_GLOO = "made where the options of its axis ask for it: gloo_twin=True"
_ENDS = "no axis spans it: torch.distributed.new_subgroups_by_enumeration, of mesh.layout.groups('pp')"
_CHOSEN = "a function that initialize_model_parallel takes may choose other ranks"
_CLOSED = Row("not mesh.closed", _over(), (), "where there is no mesh, current_mesh() raises")
_END = Row("mesh.close()", _over())
_EXPERTS = "expert_tensor_model_pipeline_parallel"
_FIRST, _LAST = 'mesh.is_first("pp")', 'mesh.is_last("pp")'

MEGATRON: dict[str, Row] = {
    **dict.fromkeys(("is_initialized", "model_parallel_is_initialized"), _CLOSED),
    "destroy_model_parallel": _END,
    **_group("tensor_model_parallel", "tp"),
    **_group("pipeline_model_parallel", "pp"),
    **_group("context_parallel", "cp"),
    "get_model_parallel_group": Row("mesh.group({axes})", _over("pp", "tp"), _CHECK),
    **_group("tensor_and_context_parallel", "cp", "tp"),
    **_group("expert_model_parallel", "ep"),
    **_group("expert_tensor_parallel", "etp"),
    **_group("expert_tensor_and_model_parallel", "ep", "etp"),
    f"get_{_EXPERTS}_group": Row("mesh.group({axes})", _over("pp", "ep", "etp"), _CHECK),
    "get_data_parallel_group": Row("mesh.group({axes})", _CP, (*_DATA, "independent_all_gather")),
    "get_data_parallel_group_gloo": Row("mesh.gloo_group({axes})", _CP, _DATA, _GLOO),
    "get_data_parallel_world_size": Row("mesh.size({axes})", _CP, _DATA),
    "get_data_parallel_rank": Row("mesh.rank({axes})", _CP, _DATA),
    "get_tensor_and_data_parallel_group": Row("mesh.group({axes})", _TP, (*_CHECK, *_WITH_CP)),
    "get_amax_reduction_group": Row("mesh.group({axes})", _AMAX, (*_WITH_CP, "tp_only_amax_red")),
    "get_expert_data_parallel_group": Row("mesh.group({axes})", _over("edp"), (*_CHECK, *_PARTIAL)),
    "get_expert_data_parallel_world_size": Row("mesh.size({axes})", _over("edp"), _PARTIAL),
    "get_expert_data_parallel_rank": Row("mesh.rank({axes})", _over("edp"), _PARTIAL),
    "get_tensor_model_parallel_src_rank": Row("mesh.ranks({axes})[0]", _over("tp")),
    "get_model_parallel_src_rank": Row("mesh.ranks({axes})[0]", _over("pp", "tp")),
    "get_data_parallel_src_rank": Row("mesh.ranks({axes})[0]", _CP, _WITH_CP),
    "get_expert_model_parallel_src_rank": Row("mesh.ranks({axes})[0]", _over("ep")),
    "get_context_parallel_global_ranks": Row("list(mesh.ranks({axes}))", _over("cp"), _CHECK),
    "get_pipeline_model_parallel_first_rank": Row("mesh.ranks({axes})[0]", _over("pp")),
    "get_pipeline_model_parallel_last_rank": Row("mesh.ranks({axes})[-1]", _over("pp")),
    "get_pipeline_model_parallel_next_rank": Row("mesh.next({axes})", _over("pp")),
    "get_pipeline_model_parallel_prev_rank": Row("mesh.prev({axes})", _over("pp")),
    "is_pipeline_first_stage": Row(_FIRST, _over(), _STAGE),
    "is_pipeline_last_stage": Row(_LAST, _over(), _STAGE),
    "is_rank_in_embedding_group": Row(f"{_FIRST} or {_LAST}", _over(), _STAGE, _CHOSEN),
    "is_rank_in_position_embedding_group": Row(_FIRST, _over(), (), _CHOSEN),
    **dict.fromkeys(("get_embedding_group", "get_position_embedding_group"), Row("", _over(), (), _ENDS)),
}
"""The names of Megatron's ``parallel_state``. What is not here stays."""
for _row in MEGATRON_GROUPS:
    if _row.members == "all" and "gtp" not in _row.name and "intra" not in _row.name:
        MEGATRON[_row.variable] = Row("mesh.group({axes})", _over(*_row.axes))
        if _row.ranks:
            MEGATRON[_row.ranks] = Row("list(mesh.ranks({axes}))", _over(*_row.axes))

FAIRSCALE: dict[str, Row] = {
    "model_parallel_is_initialized": _CLOSED,
    "destroy_model_parallel": _END,
    **_group("model_parallel", "tp"),
    **_group("data_parallel", "dp"),
    "get_pipeline_parallel_group": Row("mesh.group({axes})", _over("pp")),
    "get_pipeline_parallel_ranks": Row("list(mesh.ranks({axes}))", _over("pp")),
    "get_model_parallel_src_rank": Row("mesh.ranks({axes})[0]", _over("tp")),
}
"""The names of fairscale's ``nn.model_parallel.initialize``."""

_MEGATRONS = ("megatron.core.parallel_state", "megatron.core.mpu", "namedmesh.compat.megatron.parallel_state")
_FAIRSCALE = "fairscale.nn.model_parallel"
_FAIRSCALES = (f"{_FAIRSCALE}.initialize", _FAIRSCALE, "namedmesh.compat.fairscale")
APIS = dict.fromkeys(_MEGATRONS, MEGATRON) | dict.fromkeys(_FAIRSCALES, FAIRSCALE)
"""The tables by the modules that have these names."""

# The sizes of initialize_model_parallel by axis, in the order of the axes.
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_TP_SIZE, _PP_SIZE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_SIZES = {"tp": _TP_SIZE, "cp": "context_parallel_size", "ep": _EP, "dp": "", "pp": _PP_SIZE}
_FAIRSCALE_SIZES = {"tp": "model_parallel_size_", "pp": "pipeline_length", "dp": ""}
_IGNORED = {"virtual_pipeline_model_parallel_size", "create_gloo_process_groups"}


def initialize(module: str, arguments: Sequence[tuple[str, str]], *, bound: bool = False) -> Advice:
    """Return the mesh that replaces ``initialize_model_parallel``; bound to Megatron where others still read it.

    Example:
        >>> initialize("megatron.core.parallel_state", [("", "2"), ("", "4")]).new
        'namedmesh.init_mesh(pp=4, dp=-1, cp=1, tp=2)'
    """
    sizes, doubts, once = _SIZES, list[str](), list[str]()
    if "fairscale" in module:
        sizes, bound = _FAIRSCALE_SIZES, False
    given = named(arguments, (sizes["tp"], sizes["pp"], "virtual_pipeline_model_parallel_size"))
    usual = "-".join(sizes)
    order = parse_order(str(_literal(given.pop("order", usual))).lower(), [*sizes])
    axes = [axis for axis in reversed(order.tokens) if axis in sizes and axis != "ep"]
    if order.unknown:
        doubts.append("what the order is decides the axes")
    elif _EP in given and order.tokens != [*sizes]:
        doubts.append("views follow the order: put ep where it stands")
    written = [f"{axis}={given.get(sizes[axis], '1') if sizes[axis] else '-1'}" for axis in axes]
    if _EP in given or _ETP in given:
        ep, etp, tp = given.pop(_EP, "1"), given.pop(_ETP, "None"), given.get(_TP_SIZE, "1")
        once.append(_EXPERT_VIEW.replace(_EP, ep).replace(_ETP, tp if etp == "None" else etp))
        doubts.append("run once after it, on every rank")
    others = [name for name in given if name not in {*sizes.values(), *_IGNORED}]
    if others:
        doubts.append(f"what {', '.join(others)} asks for is missing here")
    new = f"namedmesh.init_mesh({', '.join(written)})"
    return Advice(f"namedmesh.compat.megatron.bind({new})" if bound else new, tuple(once), "; ".join(doubts))


def advise(module: str, leaf: str, arguments: Arguments | None, *, bound: bool = False) -> Advice | None:
    """Return what replaces a call of a name of a module, or without arguments a use that is none; None for other names."""
    table = APIS.get(module)
    if table is None:  # a name that only a module of the code itself can hand on
        table = MEGATRON | FAIRSCALE if "parallel" in leaf.lower() else {}
    if leaf == "initialize_model_parallel" and arguments is not None:
        return initialize(module, arguments, bound=bound)
    if leaf in table:
        advice = table[leaf].advise(arguments or ())
        if arguments is None and not leaf.startswith("_"):
            return advice._replace(doubt="passed on, not called: its arguments are given elsewhere")
        return advice
    known = module in APIS and f"{module}.{leaf}" not in APIS
    return Advice("", doubt="not in the table: it stays") if known else None
