"""The migration table: every name of Megatron's ``parallel_state``, and the mesh call that replaces it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from namedmesh.dialects import DIALECTS, MEGATRON_GROUPS
from namedmesh.migrate.initialize import INITIALIZE, RANK_GENERATOR
from namedmesh.migrate.rules import DIALECT, Advice, Arguments, Entry, Variant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CP = "with_context_parallel"
_PART = "partial_data_parallel"
_EXPERT_PART = "partial_expert_data_parallel"
_GATHERED = "with_gtp_remat"


def _axes_by_group() -> dict[str, dict[str, str]]:
    """Return the axes of each group of Megatron, by the flags of its getter, as source text."""
    axes: dict[str, dict[str, str]] = {
        "data_parallel": {
            f"{_CP} {_PART}": '"dp_shard"',
            f"{_CP} {_PART} {_GATHERED}": '"dp_shard"',
            f"{_CP} independent_all_gather": '"dp_cp_gather"',
        },
        "expert_data_parallel": {_EXPERT_PART: '"edp_shard"', f"{_EXPERT_PART} {_GATHERED}": '"edp_shard"'},
    }
    gathered = [kind for kind in MEGATRON_GROUPS if "gtp" in kind.name and kind.members != "part"]
    for kind in (*DIALECTS["megatron"].kinds, *gathered):
        name, _, flags = kind.name.partition(" ")
        axes.setdefault(name, {})[flags] = ", ".join(f'"{axis}"' for axis in kind.axes)
    # One optimizer instance of several has a part of the experts' replicas.
    axes["intra_distributed_optimizer_instance"] = {"": '"pp", "edp_shard", "ep", "etp"'}
    axes["inter_distributed_optimizer_instance"] = {"": '"edp_replicate"'}
    return axes


_AXES = _axes_by_group()

_LEVELS = '[mesh.group("cp_inner"), mesh.group("cp_outer")]'
_HYBRID = '{mesh.size("hybrid"): mesh.group("hybrid")}'
_ENDS = 'sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]})'
_LAST_STAGE = 'mesh.is_last("pp") and {vp_stage} == virtual_stages - 1'

_DEPRECATED = "deprecated in Megatron too"
_SEVERAL_MESHES = (
    "several meshes can be alive; code that was given none asks namedmesh.current_mesh(), which raises MeshError "
    "where there is none"
)
_OWN_VARIABLE = "keep the number in a variable of your own"
_OWN_STAGE = Variant("", f"{_OWN_VARIABLE} and pass it to what needs it")
_OVERRIDE = Variant(
    "",
    "it overrides an answer and makes no group: make a second mesh of the sizes wanted (over part of the world with "
    "part=True) and select it with 'with mesh:'",
)
_OVERRIDDEN = Variant(
    "",
    "an override that set_... assigns, None otherwise; what it overrides is mesh.rank(...) or mesh.size(...)",
)
_OVERRIDABLE = (
    *("data_parallel", "tensor_model_parallel", "pipeline_model_parallel"),
    *("expert_model_parallel", "expert_tensor_parallel"),
)
_FREED = "torch's allocator hands freed memory out again"
_BUFFER = Variant("", f"torch.empty(shape, dtype=dtype, device=mesh.device) does the same: {_FREED}")
_SYMMETRIC = Variant("", "it wraps torch's symmetric memory, over mesh.group('tp')")
_BUFFER_VARIABLE = Variant("", f"torch.empty(...): {_FREED}")
_NONE_ELSEWHERE = "Megatron has None on the other ranks"
# The groups that are not those over some axes, and their ranks.
_SPECIAL: dict[str, str | Variant] = {
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": _LEVELS,
    "_HYBRID_DP_CP_GROUPS": _HYBRID,
    "_EMBEDDING_GROUP": "embedding_group",
    "_POSITION_EMBEDDING_GROUP": "position_embedding_group",
    "_EMBEDDING_GLOBAL_RANKS": Variant(_ENDS, _NONE_ELSEWHERE),
    "_POSITION_EMBEDDING_GLOBAL_RANKS": Variant('[mesh.ranks("pp")[0]]', _NONE_ELSEWHERE),
}


def _variables(*, gathered: bool) -> dict[str, str | Variant]:
    """Return the module-level variables of Megatron's groups, with or without gathered weights, and their expressions."""
    columns = {
        "variable": "mesh.group(<{}>)",
        "gloo": "mesh.gloo_group(<{}>)",
        "ranks": "list(mesh.ranks(<{}>))",
    }
    return {
        name: _SPECIAL.get(name, expression.format(kind.name))
        for column, expression in columns.items()
        for kind in MEGATRON_GROUPS
        if (name := getattr(kind, column)) and ("gtp" in kind.name) == gathered
    }


def _sizes_and_ranks(*names: str, flags: str = "") -> dict[str, str]:
    """Return the functions ``get_NAME_world_size`` and ``get_NAME_rank`` of some groups."""
    return {
        f"get_{name}_{answer}({flags})": f"mesh.{method}(<{name}>)"
        for name in names
        for answer, method in (("world_size", "size"), ("rank", "rank"))
    }


# For each section of the page its functions, as ``name(required[, optional])``, and other names; for each the
# expression that replaces it, empty where it stays in the dialect, with a remark or by flags where it has them.
# ``<data_parallel>`` stands for the axes of a group, which the flags of the function determine.
_SOURCE: dict[str, Mapping[str, str | Variant | Mapping[str, str]]] = {
    "Making and closing": {
        "is_initialized()": Variant("not mesh.closed", _SEVERAL_MESHES),
        "is_unitialized()": Variant("mesh.closed", _DEPRECATED),
        "model_parallel_is_initialized()": Variant("not mesh.closed", _SEVERAL_MESHES),
        "destroy_model_parallel()": Variant(
            "mesh.close()", "it destroys the groups that the mesh made, where Megatron only forgets them"
        ),
    },
    "Groups": {
        "get_tensor_model_parallel_group([check_initialized])": "mesh.group(<tensor_model_parallel>)",
        "get_pipeline_model_parallel_group([check_initialized])": "mesh.group(<pipeline_model_parallel>)",
        "get_context_parallel_group([check_initialized])": "mesh.group(<context_parallel>)",
        f"get_data_parallel_group([{_CP}, {_PART}, independent_all_gather])": "mesh.group(<data_parallel>)",
        f"get_data_parallel_group_gloo([{_CP}, {_PART}])": "mesh.gloo_group(<data_parallel>)",
        "has_separate_all_gather_group()": Variant(
            '"gather" in mesh.views', "the view is the one that independent_all_gather=True goes with"
        ),
        "get_model_parallel_group([check_initialized])": "mesh.group(<model_parallel>)",
        f"get_tensor_and_data_parallel_group([check_initialized, {_CP}])": "mesh.group(<tensor_and_data_parallel>)",
        "get_tensor_and_context_parallel_group([check_initialized])": "mesh.group(<tensor_and_context_parallel>)",
        f"get_amax_reduction_group([{_CP}, tp_only_amax_red])": {
            f"{_CP} tp_only_amax_red": "mesh.group(<tensor_and_context_parallel>)",
            _CP: 'mesh.group("dp", "cp", "tp")',
            "tp_only_amax_red": "mesh.group(<tensor_model_parallel>)",
            "": 'mesh.group("dp", "tp")',
        },
        "get_hierarchical_context_parallel_groups([check_initialized])": _LEVELS,
        "get_hybrid_data_context_parallel_groups([check_initialized, group_size])": Variant(
            'mesh.group("hybrid")',
            "one view, with names of its own, for each group_size; as large as dp and cp together it is "
            'mesh.group("dp", "cp")',
        ),
        "get_embedding_group([check_initialized])": "embedding_group",
        "get_position_embedding_group([check_initialized])": "position_embedding_group",
    },
    "Sizes and ranks": {
        **_sizes_and_ranks("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"),
        **_sizes_and_ranks("data_parallel", flags=f"[{_CP}, {_PART}]"),
        **_sizes_and_ranks("tensor_and_context_parallel"),
        "get_tensor_model_parallel_src_rank()": "mesh.ranks(<tensor_model_parallel>)[0]",
        "get_model_parallel_src_rank()": "mesh.ranks(<model_parallel>)[0]",
        f"get_data_parallel_src_rank([{_CP}])": "mesh.ranks(<data_parallel>)[0]",
        "get_context_parallel_global_ranks([check_initialized])": "list(mesh.ranks(<context_parallel>))",
        "get_pipeline_model_parallel_first_rank()": "mesh.ranks(<pipeline_model_parallel>)[0]",
        "get_pipeline_model_parallel_last_rank()": "mesh.ranks(<pipeline_model_parallel>)[-1]",
        "get_pipeline_model_parallel_next_rank()": "mesh.next(<pipeline_model_parallel>)",
        "get_pipeline_model_parallel_prev_rank()": "mesh.prev(<pipeline_model_parallel>)",
        "get_all_ranks()": Variant(
            '"_".join(str(mesh.rank(axis)) for axis in ("tp", "dp", "cp", "pp", "ep"))',
            "mesh.coords has the same by name",
        ),
    },
    "Stages": {
        "is_pipeline_first_stage([ignore_virtual, vp_stage])": {
            "ignore_virtual=False": 'mesh.is_first("pp") and {vp_stage} == 0',
            "": 'mesh.is_first("pp")',
        },
        "is_pipeline_last_stage([ignore_virtual, vp_stage])": {
            "ignore_virtual=False": _LAST_STAGE,
            "": 'mesh.is_last("pp")',
        },
        "is_rank_in_embedding_group([ignore_virtual, vp_stage])": {
            "ignore_virtual=False": f'(mesh.is_first("pp") and {{vp_stage}} == 0) or ({_LAST_STAGE})',
            "": 'mesh.is_first("pp") or mesh.is_last("pp")',
        },
        "is_rank_in_position_embedding_group()": 'mesh.is_first("pp")',
        "default_embedding_ranks(pp_ranks)": _ENDS,
        "default_position_embedding_ranks(pp_ranks)": '[mesh.ranks("pp")[0]]',
        "get_virtual_pipeline_model_parallel_rank()": _OWN_STAGE,
        "get_virtual_pipeline_model_parallel_world_size()": _OWN_STAGE,
    },
    "Experts": {
        "get_expert_model_parallel_group([check_initialized])": "mesh.group(<expert_model_parallel>)",
        "get_expert_tensor_parallel_group([check_initialized])": "mesh.group(<expert_tensor_parallel>)",
        "get_expert_tensor_and_model_parallel_group([check_initialized])": "mesh.group(<expert_tensor_and_model_parallel>)",
        "get_expert_tensor_model_pipeline_parallel_group([check_initialized])": "mesh.group(<expert_tensor_model_pipeline_parallel>)",
        f"get_expert_data_parallel_group([check_initialized, {_EXPERT_PART}])": "mesh.group(<expert_data_parallel>)",
        f"get_data_modulo_expert_parallel_group([{_EXPERT_PART}])": Variant(
            "mesh.group(<expert_data_parallel>)", _DEPRECATED
        ),
        f"get_expert_data_parallel_group_gloo([{_EXPERT_PART}])": "mesh.gloo_group(<expert_data_parallel>)",
        "get_intra_distributed_optimizer_instance_group([check_initialized])": "mesh.group(<intra_distributed_optimizer_instance>)",
        "get_inter_distributed_optimizer_instance_group([check_initialized])": "mesh.group(<inter_distributed_optimizer_instance>)",
        **_sizes_and_ranks(
            "expert_model_parallel", "expert_tensor_parallel", "expert_tensor_and_model_parallel"
        ),
        **_sizes_and_ranks("expert_data_parallel", flags=f"[{_EXPERT_PART}]"),
        "get_expert_model_parallel_src_rank()": "mesh.ranks(<expert_model_parallel>)[0]",
    },
    "Making groups by hand": {
        "generate_masked_orthogonal_rank_groups(world_size, parallel_size, mask)": Variant(
            'namedmesh.Layout.from_order("tp-dp-pp", tp=2, dp=3, pp=4).groups("dp")',
            "names in place of the mask; like parallel_size, the order string has the fastest axis first",
        ),
        "create_group(ranks[, timeout, backend, pg_options, use_local_synchronization, group_desc])": Variant(
            "torch.distributed.new_group({ranks})",
            "torch's function takes the same keywords; ranks that are a product of axes need no new group: "
            "mesh.flatten(...) or mesh.add_view(...)",
        ),
        "create_hierarchical_groups(rank, ranks, hierarchical_group_sizes[, create_gloo_process_groups, pg_options, "
        "timeout, group_desc])": Variant(
            _LEVELS, "one axis of a view for each level, the first level innermost"
        ),
        "create_hybrid_dp_cp_groups(rank, ranks, pg_options)": Variant(
            _HYBRID, "a view for each size that is used"
        ),
        "get_nccl_options(pg_name, nccl_comm_cfgs)": Variant(
            "namedmesh.GroupOptions.from_yaml(nccl_communicator_config_path)",
            "options by axis, for options= of init_mesh and add_view; the keys of the file are axes: ep_tp is etp, "
            "ep_dp is edp, mp is pp_tp, tp_dp is dp_tp, tp_cp is cp_tp, tp_dp_cp is dp_cp_tp",
        ),
        "overwrite_nccl_comm_cfgs(nccl_comm_cfgs, pg_name, key_value_pair)": Variant(
            "namedmesh.GroupOptions(high_priority=True)",
            'set what the pair sets, and pass it as options={"tp": ...}, under the name of the axis',
        ),
        "update_pg_timeout(timeout[, pg])": Variant(
            "namedmesh.GroupOptions(timeout={timeout})",
            "a group is given its timeout when it is made: timeout= or options= of init_mesh; to change it on live "
            f"groups, stay with {DIALECT}",
        ),
        "logger": 'logging.getLogger("namedmesh")',
    },
    "Weights that are gathered for each use": {
        **{
            f"get_{name}_{function}": expression.format(name)
            for name in ("gtp_weight_remat", "expert_gtp_weight_remat")
            for function, expression in (
                ("group([check_initialized])", "mesh.group(<{}>)"),
                ("world_size()", "mesh.size(<{}>)"),
                ("rank()", "mesh.rank(<{}>)"),
                ("global_ranks([check_initialized])", "list(mesh.ranks(<{}>))"),
            )
        },
        **_variables(gathered=True),
        "_inject_gtp_remat_axis(order_str[, after])": Variant(
            "",
            "the axes of a mesh are named in their order: gtp_remat stands before tp, and egtp_remat before ep",
        ),
        "create_all_gather_groups([for_expert_parallelism, timeout, nccl_comm_cfgs])": Variant(
            '(mesh.group("dp_cp_gather"), None)',
            "of the experts likewise: a view with an axis of its own and share=False",
        ),
    },
    "What stays": {
        **{f"set_{axis}_rank(rank)": _OVERRIDE for axis in _OVERRIDABLE},
        **{f"set_{axis}_world_size(world_size)": _OVERRIDE for axis in _OVERRIDABLE[1:]},
        "set_virtual_pipeline_model_parallel_rank(rank)": _OWN_STAGE,
        "set_virtual_pipeline_model_parallel_world_size(world_size)": _OWN_STAGE,
        "get_global_memory_buffer()": _BUFFER,
        "destroy_global_memory_buffer()": _BUFFER,
        "get_global_symmetric_memory_buffer()": _SYMMETRIC,
        "destroy_global_symmetric_memory_buffer()": _SYMMETRIC,
    },
    "Private names, when they are read": {
        **_variables(gathered=False),
        "_global_process_group_list": "[held.group for held in mesh.communicators]",
        **{
            f"_MPU_{axis.upper()}_{answer}": _OVERRIDDEN
            for axis in _OVERRIDABLE
            for answer in ("RANK", "WORLD_SIZE")
        },
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": Variant("", _OWN_VARIABLE),
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": Variant("", _OWN_VARIABLE),
        "_GLOBAL_MEMORY_BUFFER": _BUFFER_VARIABLE,
        "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": _BUFFER_VARIABLE,
        "_set_global_memory_buffer()": _BUFFER_VARIABLE,
        "_set_global_symmetric_memory_buffer()": _BUFFER_VARIABLE,
    },
}
# Calls for the page where the required arguments, or the flags, do not show enough.
_EXAMPLES = {
    "get_hybrid_data_context_parallel_groups": ("group_size=group_size",),
    "generate_masked_orthogonal_rank_groups": ("24, [2, 3, 4], [False, True, False]",),
    "overwrite_nccl_comm_cfgs": ("nccl_comm_cfgs, 'tp', ('is_high_priority_stream', True)",),
    "is_pipeline_first_stage": ("ignore_virtual=False, vp_stage=stage", ""),
    "is_pipeline_last_stage": ("ignore_virtual=False, vp_stage=stage", ""),
    "is_rank_in_embedding_group": ("ignore_virtual=False, vp_stage=stage", ""),
}


def _entry(signature: str, source: str | Variant | Mapping[str, str]) -> Entry:
    name, call, text = signature.partition("(")
    parameters = tuple(re.findall(r"\w+", text)) if call else None
    required = text.partition("[")[0].rstrip(", )")
    examples = _EXAMPLES.get(name, (required,) * bool(required))
    note = source.note if isinstance(source, Variant) else ""
    source = source.replacement if isinstance(source, Variant) else source
    by_flags = source if isinstance(source, dict) else _by_flags(str(source), parameters or ())
    variants = tuple(
        Variant(_with_axes(expression), note, tuple(map(_condition, flags.split())))
        for flags, expression in by_flags.items()
    )
    return Entry(name, parameters, variants, tuple(f"{name}({given})" for given in examples))


def _by_flags(expression: str, parameters: tuple[str, ...]) -> dict[str, str]:
    """Expand an expression over ``<a group>`` to each set of flags of the group that the function takes."""
    match = re.search(r"<(\w+)>", expression)
    if match is None:
        return {"": expression}
    return {
        flags: expression.replace(match[0], f"<{match[1]} {flags}>")
        for flags in _AXES[match[1]]
        if set(flags.split()) <= set(parameters)
    }


def _with_axes(expression: str) -> str:
    """Fill in the axes of ``<a group flag ...>``."""
    return re.sub(r"<(\w+) ?([\w ]*)>", lambda match: _AXES[match[1]][match[2]], expression)


def _condition(flag: str) -> tuple[str, bool]:
    name, _, value = flag.partition("=")
    return name, value != "False"


SECTIONS: dict[str, tuple[Entry, ...]] = {
    section: tuple(_entry(signature, source) for signature, source in entries.items())
    for section, entries in _SOURCE.items()
}
"""The entries, by the sections of the page."""
SECTIONS["Making and closing"] = (INITIALIZE, *SECTIONS["Making and closing"])
SECTIONS["Making groups by hand"] = (RANK_GENERATOR, *SECTIONS["Making groups by hand"])

TABLE: dict[str, Entry] = {entry.name: entry for entries in SECTIONS.values() for entry in entries}
"""The entries, by legacy name."""

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
    """Return the code that replaces a legacy call or name, given as source text.

    Raises:
        KeyError: the name is not in the table.

    Example:
        >>> advise("get_data_parallel_world_size(with_context_parallel=True)").replacement
        'mesh.size("dp", "cp")'
    """
    node = ast.parse(legacy, mode="eval").body
    if not isinstance(node, ast.Call):
        return TABLE[ast.unparse(node)].advise(Arguments())
    entry = TABLE[ast.unparse(node.func)]
    return entry.advise(Arguments.of(node, entry.parameters or ()))


def rows(section: str) -> Iterator[tuple[str, Advice]]:
    """Yield each legacy call of a section, as the page shows it, and its advice.

    Example:
        >>> next((legacy, advice.replacement) for legacy, advice in rows("Groups"))
        ('get_tensor_model_parallel_group()', 'mesh.group("tp")')
    """
    for entry in SECTIONS[section]:
        for legacy in entry.legacy:
            yield legacy, advise(legacy)


def page() -> str:
    """Write the table of the migration page: a line for each call, and numbered remarks below.

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
