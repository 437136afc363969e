"""The calls of Megatron's ``parallel_state`` and fairscale's ``initialize``, and the mesh call for each: rows as data.

``mesh`` stands for the mesh; ``{axes}`` for the axes that the flags of a call choose. A test runs every row beside the original.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.dialects import MEGATRON_GROUPS

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXPERT_AXES = {"ep", "etp", "edp"}
_EXPERT_VIEW = 'mesh.add_view("expert", pp=mesh.size("pp"), edp=-1, ep=expert_model_parallel_size, etp=expert_tensor_parallel_size)'
_VIRTUAL = "vp_stage counts only where there are virtual stages, whose number is a variable of your own"


ByFlags = dict[tuple[str, ...], tuple[str, ...]]


def _over(*axes: str) -> ByFlags:
    return {(): axes}


class Advice(NamedTuple):
    """What replaces one use: an expression, what every rank runs once before it, and why it is not certain, if it is not."""

    new: str
    once: tuple[str, ...] = ()
    doubt: str = ""


@dataclass(frozen=True)
class Row:
    """One legacy name.

    Args:
        new: the expression that replaces it; empty where nothing on a mesh does.
        axes: the axes of the group, by the names of the flags that are true.
        parameters: the parameters in their order; none of a variable.
        doubt: why the replacement is not certain.
        virtual: the expression with ``ignore_virtual=False``, which is never certain.
    """

    new: str
    axes: ByFlags = field(default_factory=_over)
    parameters: tuple[str, ...] = ()
    doubt: str = ""
    virtual: str = ""

    def advise(self, arguments: Sequence[tuple[str, str]] = ()) -> Advice:
        """Return what replaces a call with some arguments, each a keyword, which may be empty, and its source.

        Example:
            >>> MEGATRON["get_data_parallel_rank"].advise([("", "True")])
            Advice(new='mesh.rank("dp", "cp")', once=(), doubt='')
        """
        given = named(arguments, self.parameters)
        literals = {name: _literal(source) for name, source in given.items()}
        flags = [name for flags in self.axes for name in flags]
        unknown = [name for name in given if name not in self.parameters]
        open_ones = [name for name in flags if name in literals and not isinstance(literals[name], bool)]
        doubt = self.doubt
        if unknown or open_ones:
            doubt = f"what {', '.join(dict.fromkeys(unknown or open_ones))} is decides it"
        unasked = ("check_initialized", "ignore_virtual")
        true = tuple(name for name in self.parameters if literals.get(name) is True and name not in unasked)
        if literals.get("check_initialized", True) is not True:
            doubt = "without a group a mesh raises an error, whatever check_initialized is"
        if true not in self.axes and not doubt:
            doubt = f"{' and '.join(true)}: a group that needs a view of its own"
        axes = self.axes.get(true, self.axes[()])
        new = self.new
        if self.virtual and literals.get("ignore_virtual", True) is not True:
            new, doubt = self.virtual, doubt or _VIRTUAL
        new = new.format(axes=", ".join(f'"{axis}"' for axis in axes), vp_stage=given.get("vp_stage", "None"))
        once = [_EXPERT_VIEW] if _EXPERT_AXES & set(axes) else []
        if "group(" in new and len(axes) > 1:
            once.append(f"mesh.flatten({', '.join(repr(axis) for axis in axes)})".replace("'", '"'))
        if once and not doubt:
            doubt = "run once before, on every rank"
        return Advice(new, tuple(once), doubt)


def named(arguments: Sequence[tuple[str, str]], parameters: Sequence[str]) -> dict[str, str]:
    """Return the sources of arguments by the names of their parameters; ``*`` and ``**`` under that name."""
    return {name or dict(enumerate(parameters)).get(place, f"argument {place + 1}"): source
            for place, (name, source) in enumerate(arguments)}  # fmt: skip


def _literal(source: str) -> object:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return source


def _group(name: str, *axes: str) -> dict[str, Row]:
    """Return the rows of a group, its size and a rank's place in it."""
    return {
        f"get_{name}_group": Row("mesh.group({axes})", _over(*axes), ("check_initialized",)),
        f"get_{name}_world_size": Row("mesh.size({axes})", _over(*axes)),
        f"get_{name}_rank": Row("mesh.rank({axes})", _over(*axes)),
    }


_CP: ByFlags = {(): ("dp",), ("with_context_parallel",): ("dp", "cp")}
_TP: ByFlags = {(): ("dp", "tp"), ("with_context_parallel",): ("dp", "cp", "tp")}
_AMAX = _TP | {("tp_only_amax_red",): ("tp",), ("with_context_parallel", "tp_only_amax_red"): ("cp", "tp")}
_CHECK, _WITH_CP, _STAGE = ("check_initialized",), ("with_context_parallel",), ("ignore_virtual", "vp_stage")
_DATA, _PARTIAL = (*_WITH_CP, "partial_data_parallel"), ("partial_expert_data_parallel",)
_GLOO = "made where the options of its axis ask for it: gloo_twin=True"
_ENDS = "no axis spans it: torch.distributed.new_subgroups_by_enumeration, of mesh.layout.groups('pp')"
_CHOSEN = "a function that initialize_model_parallel takes may choose other ranks"
_CLOSED = Row("not mesh.closed", doubt="where there is no mesh, current_mesh() raises")
_FIRST, _LAST = 'mesh.is_first("pp")', 'mesh.is_last("pp")'
_AS_LAST = f"{_LAST} and {{vp_stage}} in (None, virtual_stages - 1)"

MEGATRON: dict[str, Row] = {
    **dict.fromkeys(("is_initialized", "model_parallel_is_initialized"), _CLOSED),
    "destroy_model_parallel": Row("mesh.close()"),
    **_group("tensor_model_parallel", "tp"),
    **_group("pipeline_model_parallel", "pp"),
    **_group("context_parallel", "cp"),
    "get_model_parallel_group": Row("mesh.group({axes})", _over("pp", "tp"), _CHECK),
    **_group("tensor_and_context_parallel", "cp", "tp"),
    **_group("expert_model_parallel", "ep"),
    **_group("expert_tensor_parallel", "etp"),
    **_group("expert_tensor_and_model_parallel", "ep", "etp"),
    "get_expert_tensor_model_pipeline_parallel_group": Row(
        "mesh.group({axes})", _over("pp", "ep", "etp"), _CHECK
    ),
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
    "get_pipeline_model_parallel_first_rank": Row('mesh.ranks("pp")[0]'),
    "get_pipeline_model_parallel_last_rank": Row('mesh.ranks("pp")[-1]'),
    "get_pipeline_model_parallel_next_rank": Row('mesh.next("pp")'),
    "get_pipeline_model_parallel_prev_rank": Row('mesh.prev("pp")'),
    "is_pipeline_first_stage": Row(_FIRST, _over(), _STAGE, "", f"{_FIRST} and {{vp_stage}} in (None, 0)"),
    "is_pipeline_last_stage": Row(_LAST, _over(), _STAGE, "", _AS_LAST),
    "is_rank_in_embedding_group": Row(f"{_FIRST} or {_LAST}", _over(), _STAGE, _CHOSEN),
    "is_rank_in_position_embedding_group": Row(_FIRST, doubt=_CHOSEN),
    **dict.fromkeys(("get_embedding_group", "get_position_embedding_group"), Row("", doubt=_ENDS)),
}
"""The names of Megatron's ``parallel_state``. What is not here stays."""
for _row in MEGATRON_GROUPS:
    if _row.members == "all" and "gtp" not in _row.name and "intra" not in _row.name:
        _axes = _over(*(axis for axis in _row.axes if "gtp" not in axis))
        _private = {_row.variable: "mesh.group({axes})", _row.ranks: "list(mesh.ranks({axes}))"}
        MEGATRON |= {name: Row(new, _axes) for name, new in _private.items() if name}

FAIRSCALE: dict[str, Row] = {
    "model_parallel_is_initialized": _CLOSED,
    "destroy_model_parallel": Row("mesh.close()"),
    **_group("model_parallel", "tp"),
    **_group("data_parallel", "dp"),
    "get_pipeline_parallel_group": Row("mesh.group({axes})", _over("pp")),
    "get_pipeline_parallel_ranks": Row("list(mesh.ranks({axes}))", _over("pp")),
    "get_model_parallel_src_rank": Row("mesh.ranks({axes})[0]", _over("tp")),
}
"""The names of fairscale's ``nn.model_parallel.initialize``."""

APIS = {
    "megatron.core.parallel_state": MEGATRON,
    "megatron.core.mpu": MEGATRON,
    "namedmesh.compat.megatron.parallel_state": MEGATRON,
    "fairscale.nn.model_parallel.initialize": FAIRSCALE,
    "fairscale.nn.model_parallel": FAIRSCALE,
    "namedmesh.compat.fairscale": FAIRSCALE,
}
"""The tables by the modules that have these names."""

# The sizes of initialize_model_parallel by axis, slowest first; and its first parameters.
_TP_SIZE, _PP_SIZE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_EP_SIZE, _ETP_SIZE = "expert_model_parallel_size", "expert_tensor_parallel_size"
_IGNORED = ("create_gloo_process_groups", "virtual_pipeline_model_parallel_size")
_MEGATRON_SIZES = {"pp": _PP_SIZE, "dp": "", "cp": "context_parallel_size", "tp": _TP_SIZE}
_FAIRSCALE_SIZES = {"dp": "", "pp": "pipeline_length", "tp": "model_parallel_size_"}
_ORDER = "tp-cp-ep-dp-pp"


def initialize(module: str, arguments: Sequence[tuple[str, str]], *, bound: bool = False) -> Advice:
    """Return the mesh that replaces ``initialize_model_parallel``; bound to Megatron where others still read it.

    Example:
        >>> initialize("megatron.core.parallel_state", [("", "2"), ("", "4")]).new
        'namedmesh.init_mesh(pp=4, dp=-1, cp=1, tp=2)'
    """
    is_megatron = "fairscale" not in module
    sizes = _MEGATRON_SIZES if is_megatron else _FAIRSCALE_SIZES
    given = named(
        arguments,
        (_TP_SIZE, _PP_SIZE, _IGNORED[1]) if is_megatron else ("model_parallel_size_", "pipeline_length"),
    )
    doubts, once, order = list[str](), list[str](), _literal(given.pop("order", repr(_ORDER)))
    tokens = order.lower().split("-") if isinstance(order, str) else []
    axes = list(sizes)
    if is_megatron:
        if not {"tp", "dp", "pp"} <= {*tokens}:
            doubts.append("what the order is decides the axes")
        elif [token for token in _ORDER.split("-") if token in tokens] != tokens:
            left_out = [axis for axis in sizes if axis not in tokens]
            axes = [*left_out, *(axis for axis in reversed(tokens) if axis in sizes)]
            doubts += ["views follow the order: put ep where it stands"] if _EP_SIZE in given else []
    written = [f"{axis}={given.get(sizes[axis], '1') if sizes[axis] else '-1'}" for axis in axes]
    if _EP_SIZE in given or _ETP_SIZE in given:
        ep, etp, tp = given.pop(_EP_SIZE, "1"), given.pop(_ETP_SIZE, "None"), given.get(_TP_SIZE, "1")
        once.append(_EXPERT_VIEW.replace(_EP_SIZE, ep).replace(_ETP_SIZE, tp if etp == "None" else etp))
        doubts.append("run once after it, on every rank")
    others = [name for name in given if name not in {*sizes.values(), *_IGNORED}]
    if others:
        doubts.append(f"what {', '.join(others)} asks for is missing here")
    new = f"namedmesh.init_mesh({', '.join(written)})"
    if bound and is_megatron:
        new = f"namedmesh.compat.megatron.bind({new})"
    return Advice(new, tuple(once), "; ".join(doubts))
