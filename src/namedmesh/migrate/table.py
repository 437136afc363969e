"""The migration table of Megatron: every name of ``parallel_state``, and the mesh call for it.

A row is Python on both sides: a function with its parameters and defaults, and an expression over these parameters.
"""

from __future__ import annotations

from namedmesh.dialects import MEGATRON_GROUPS
from namedmesh.migrate.initialize import INITIALIZE, RANK_GENERATOR
from namedmesh.migrate.rules import Row

_DEPRECATED = "deprecated in Megatron too"
SEVERAL_MESHES = (
    "several meshes can be alive; code that was given none asks namedmesh.current_mesh(), which raises MeshError "
    "where there is none"
)
_CLOSES = "it destroys the groups that the mesh made, where Megatron only forgets them"
OWN_VARIABLE = "keep the number in a variable of your own"
_OWN_STAGE = f"{OWN_VARIABLE} and pass it to what needs it"
OVERRIDE = (
    "it overrides an answer and makes no group: make a second mesh of the sizes wanted (over part of the world with "
    "part=True) and select it with 'with mesh:'"
)
_OVERRIDDEN = (
    "an override that set_... assigns, None otherwise; what it overrides is mesh.rank(...) or mesh.size(...)"
)
_OVERRIDABLE = (
    *("data_parallel", "tensor_model_parallel", "pipeline_model_parallel"),
    *("expert_model_parallel", "expert_tensor_parallel"),
)
_FREED = "torch's allocator hands freed memory out again"
_BUFFER = f"torch.empty(shape, dtype=dtype, device=mesh.device) does the same: {_FREED}"
_BUFFER_VARIABLE = f"torch.empty(...): {_FREED}"
_SYMMETRIC = "it wraps torch's symmetric memory, over mesh.group('tp')"
_NONE_ELSEWHERE = "Megatron has None on the other ranks"
_OTHER_RANKS = "unless get_embedding_ranks, or a split of the pipeline in older releases, chooses other ranks"
_OWN_PIPELINE = "for the pipeline of this rank"
_GATHER_GROUP = "the view is the one that independent_all_gather=True goes with"
_LEVELS = '[mesh.group("cp_inner"), mesh.group("cp_outer")]'
_HYBRID = '{mesh.size("hybrid"): mesh.group("hybrid")}'
_ENDS = 'sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]})'
_FIRST_STAGE = 'mesh.is_first("pp") and vp_stage == 0'
_LAST_STAGE = 'mesh.is_last("pp") and vp_stage == virtual_stages - 1'
_STAGES = ("ignore_virtual=False, vp_stage=stage", "ignore_virtual=True")
_CP_FLAG = "with_context_parallel=False"
_DATA_FLAGS = f"{_CP_FLAG}, partial_data_parallel=False"
_EXPERT_FLAG = "partial_expert_data_parallel=False"
_CHECK = "check_initialized=True"


def _data(method: str) -> str:
    """Return the calls of a method for the groups over the data axes, by the flags of their getters."""
    return (
        f'mesh.{method}("dp_shard") if with_context_parallel and partial_data_parallel else '
        f'(mesh.{method}("dp", "cp") if with_context_parallel else mesh.{method}("dp"))'
    )


def _expert_data(method: str) -> str:
    return f'mesh.{method}("edp_shard") if partial_expert_data_parallel else mesh.{method}("edp")'


def size_and_rank(name: str, axes: str, *, src: bool = False) -> list[Row]:
    """Return the rows of the size, the rank and, if asked for, the first rank of a group."""
    rows = [
        Row(f"get_{name}_world_size()", f"mesh.size({axes})"),
        Row(f"get_{name}_rank()", f"mesh.rank({axes})"),
    ]
    return [*rows, Row(f"get_{name}_src_rank()", f"mesh.ranks({axes})[0]")] if src else rows


def _variables(*, gathered: bool) -> list[Row]:
    """Return the module-level variables of Megatron's groups, with or without gathered weights."""
    rows: dict[str, Row] = {}
    for group in MEGATRON_GROUPS:
        named = [f'"{axis}"' for axis in group.axes if gathered or "gtp" not in axis]
        axes = _PARTS.get(group.variable, ", ".join(named))
        answers = {
            group.variable: f"mesh.group({axes})",
            group.gloo: f"mesh.gloo_group({axes})",
            group.ranks: f"list(mesh.ranks({axes}))",
        }
        if ("gtp" in group.name) == gathered:
            rows |= {
                name: _SPECIAL.get(name) or Row(name, answer) for name, answer in answers.items() if name
            }
    return list(rows.values())


# The axes of the groups over part of an axis, and the variables that do not hold a group over some axes.
_PARTS = {
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": '"dp_cp_gather"',
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": '"dp_shard"',
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": '"dp_shard"',
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": '"edp_shard"',
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": '"edp_shard"',
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": '"edp_replicate"',
    # One optimizer instance of several has a part of the experts' replicas.
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": '"pp", "edp_shard", "ep", "etp"',
}
_SPECIAL = {
    row.name: row
    for row in (
        Row("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", _LEVELS),
        Row("_HYBRID_DP_CP_GROUPS", _HYBRID),
        Row("_EMBEDDING_GROUP", "embedding_group"),
        Row("_POSITION_EMBEDDING_GROUP", "position_embedding_group"),
        Row("_EMBEDDING_GLOBAL_RANKS", _ENDS, _NONE_ELSEWHERE),
        Row("_POSITION_EMBEDDING_GLOBAL_RANKS", '[mesh.ranks("pp")[0]]', _NONE_ELSEWHERE),
    )
}

SECTIONS: dict[str, list[Row]] = {
    "Making and closing": [
        INITIALIZE,
        Row("is_initialized()", "not mesh.closed", SEVERAL_MESHES),
        Row("is_unitialized()", "mesh.closed", _DEPRECATED),
        Row("model_parallel_is_initialized()", "not mesh.closed", SEVERAL_MESHES),
        Row("destroy_model_parallel()", "mesh.close()", _CLOSES),
    ],
    "Groups": [
        Row(f"get_tensor_model_parallel_group({_CHECK})", 'mesh.group("tp")'),
        Row(f"get_pipeline_model_parallel_group({_CHECK})", 'mesh.group("pp")'),
        Row(f"get_context_parallel_group({_CHECK})", 'mesh.group("cp")'),
        Row(
            f"get_data_parallel_group({_DATA_FLAGS}, independent_all_gather=False)",
            f'mesh.group("dp_cp_gather") if with_context_parallel and independent_all_gather else ({_data("group")})',
        ),
        Row(f"get_data_parallel_group_gloo({_DATA_FLAGS})", _data("gloo_group")),
        Row("has_separate_all_gather_group()", '"gather" in mesh.views', _GATHER_GROUP),
        Row(f"get_model_parallel_group({_CHECK})", 'mesh.group("pp", "tp")'),
        Row(
            f"get_tensor_and_data_parallel_group({_CHECK}, {_CP_FLAG})",
            'mesh.group("dp", "cp", "tp") if with_context_parallel else mesh.group("dp", "tp")',
        ),
        Row(f"get_tensor_and_context_parallel_group({_CHECK})", 'mesh.group("cp", "tp")'),
        Row(
            f"get_amax_reduction_group({_CP_FLAG}, tp_only_amax_red=False)",
            'mesh.group("cp", "tp") if with_context_parallel and tp_only_amax_red else (mesh.group("dp", "cp", "tp") '
            'if with_context_parallel else (mesh.group("tp") if tp_only_amax_red else mesh.group("dp", "tp")))',
        ),
        Row(f"get_hierarchical_context_parallel_groups({_CHECK})", _LEVELS),
        Row(
            f"get_hybrid_data_context_parallel_groups({_CHECK}, group_size=None)",
            'mesh.group("hybrid")',
            "one view, with names of its own, for each group_size; as large as dp and cp together it is "
            'mesh.group("dp", "cp")',
            ("group_size=group_size",),
        ),
        Row(f"get_embedding_group({_CHECK})", "embedding_group"),
        Row(f"get_position_embedding_group({_CHECK})", "position_embedding_group"),
    ],
    "Sizes and ranks": [
        *size_and_rank("tensor_model_parallel", '"tp"', src=True),
        *size_and_rank("pipeline_model_parallel", '"pp"'),
        *size_and_rank("context_parallel", '"cp"'),
        Row(f"get_data_parallel_world_size({_DATA_FLAGS})", _data("size")),
        Row(f"get_data_parallel_rank({_DATA_FLAGS})", _data("rank")),
        *size_and_rank("tensor_and_context_parallel", '"cp", "tp"'),
        Row("get_model_parallel_src_rank()", 'mesh.ranks("pp", "tp")[0]'),
        Row(
            f"get_data_parallel_src_rank({_CP_FLAG})",
            'mesh.ranks("dp", "cp")[0] if with_context_parallel else mesh.ranks("dp")[0]',
        ),
        Row(f"get_context_parallel_global_ranks({_CHECK})", 'list(mesh.ranks("cp"))'),
        Row("get_pipeline_model_parallel_first_rank()", 'mesh.ranks("pp")[0]'),
        Row("get_pipeline_model_parallel_last_rank()", 'mesh.ranks("pp")[-1]'),
        Row("get_pipeline_model_parallel_next_rank()", 'mesh.next("pp")'),
        Row("get_pipeline_model_parallel_prev_rank()", 'mesh.prev("pp")'),
        Row(
            "get_all_ranks()",
            '"_".join(str(mesh.rank(axis)) for axis in ("tp", "dp", "cp", "pp", "ep"))',
            "mesh.coords has the same by name",
        ),
    ],
    "Stages": [
        Row(
            "is_pipeline_first_stage(ignore_virtual=True, vp_stage=None)",
            f'mesh.is_first("pp") if ignore_virtual else {_FIRST_STAGE}',
            examples=_STAGES,
        ),
        Row(
            "is_pipeline_last_stage(ignore_virtual=True, vp_stage=None)",
            f'mesh.is_last("pp") if ignore_virtual else {_LAST_STAGE}',
            examples=_STAGES,
        ),
        Row(
            "is_rank_in_embedding_group(ignore_virtual=True, vp_stage=None)",
            f'mesh.is_first("pp") or mesh.is_last("pp") if ignore_virtual else ({_FIRST_STAGE}) or ({_LAST_STAGE})',
            _OTHER_RANKS,
            _STAGES,
        ),
        Row("is_rank_in_position_embedding_group()", 'mesh.is_first("pp")', _OTHER_RANKS),
        Row("default_embedding_ranks(pp_ranks)", _ENDS, _OWN_PIPELINE),
        Row("default_position_embedding_ranks(pp_ranks)", '[mesh.ranks("pp")[0]]', _OWN_PIPELINE),
        Row("get_virtual_pipeline_model_parallel_rank()", note=_OWN_STAGE),
        Row("get_virtual_pipeline_model_parallel_world_size()", note=_OWN_STAGE),
    ],
    "Experts": [
        Row(f"get_expert_model_parallel_group({_CHECK})", 'mesh.group("ep")'),
        Row(f"get_expert_tensor_parallel_group({_CHECK})", 'mesh.group("etp")'),
        Row(f"get_expert_tensor_and_model_parallel_group({_CHECK})", 'mesh.group("ep", "etp")'),
        Row(f"get_expert_tensor_model_pipeline_parallel_group({_CHECK})", 'mesh.group("pp", "ep", "etp")'),
        Row(f"get_expert_data_parallel_group({_CHECK}, {_EXPERT_FLAG})", _expert_data("group")),
        Row(f"get_data_modulo_expert_parallel_group({_EXPERT_FLAG})", _expert_data("group"), _DEPRECATED),
        Row(f"get_expert_data_parallel_group_gloo({_EXPERT_FLAG})", _expert_data("gloo_group")),
        Row(
            f"get_intra_distributed_optimizer_instance_group({_CHECK})",
            'mesh.group("pp", "edp_shard", "ep", "etp")',
        ),
        Row(f"get_inter_distributed_optimizer_instance_group({_CHECK})", 'mesh.group("edp_replicate")'),
        *size_and_rank("expert_model_parallel", '"ep"', src=True),
        *size_and_rank("expert_tensor_parallel", '"etp"'),
        *size_and_rank("expert_tensor_and_model_parallel", '"ep", "etp"'),
        Row(f"get_expert_data_parallel_world_size({_EXPERT_FLAG})", _expert_data("size")),
        Row(f"get_expert_data_parallel_rank({_EXPERT_FLAG})", _expert_data("rank")),
    ],
    "Making groups by hand": [
        RANK_GENERATOR,
        Row(
            "generate_masked_orthogonal_rank_groups(world_size, parallel_size, mask)",
            'namedmesh.Layout.from_order("tp-dp-pp", tp=2, dp=3, pp=4).groups("dp")',
            "names in place of the mask; like parallel_size, the order string has the fastest axis first",
            ("24, [2, 3, 4], [False, True, False]",),
        ),
        Row(
            "create_group(ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False, "
            "group_desc=None)",
            "torch.distributed.new_group(ranks)",
            "torch's function takes the same keywords; ranks that are a product of axes need no new group: "
            "mesh.flatten(...) or mesh.add_view(...)",
            ("ranks",),
        ),
        Row(
            "create_hierarchical_groups(rank, ranks, hierarchical_group_sizes, create_gloo_process_groups=False, "
            "pg_options=None, timeout=None, group_desc=None)",
            _LEVELS,
            "one axis of a view for each level, the first level innermost",
        ),
        Row(
            "create_hybrid_dp_cp_groups(rank, ranks, pg_options)",
            _HYBRID,
            "a view for each size that is used",
        ),
        Row(
            "get_nccl_options(pg_name, nccl_comm_cfgs)",
            "namedmesh.GroupOptions.from_yaml(nccl_communicator_config_path)",
            "options by axis, for options= of init_mesh and add_view; the keys of the file are axes: ep_tp is etp, "
            "ep_dp is edp, mp is pp_tp, tp_dp is dp_tp, tp_cp is cp_tp, tp_dp_cp is dp_cp_tp",
        ),
        Row(
            "overwrite_nccl_comm_cfgs(nccl_comm_cfgs, pg_name, key_value_pair)",
            "namedmesh.GroupOptions(high_priority=True)",
            'set what the pair sets, and pass it as options={"tp": ...}, under the name of the axis',
            ("nccl_comm_cfgs, 'tp', ('is_high_priority_stream', True)",),
        ),
        Row(
            "update_pg_timeout(timeout, pg=None)",
            "namedmesh.GroupOptions(timeout=timeout)",
            "a group is given its timeout when it is made: timeout= or options= of init_mesh; to change it on live "
            "groups, stay with namedmesh.compat.megatron.parallel_state",
        ),
        Row("logger", 'logging.getLogger("namedmesh")'),
    ],
    "Weights that are gathered for each use": [
        Row(f"get_gtp_weight_remat_group({_CHECK})", 'mesh.group("gtp_remat")'),
        *size_and_rank("gtp_weight_remat", '"gtp_remat"'),
        Row(f"get_gtp_weight_remat_global_ranks({_CHECK})", 'list(mesh.ranks("gtp_remat"))'),
        Row(f"get_expert_gtp_weight_remat_group({_CHECK})", 'mesh.group("egtp_remat")'),
        *size_and_rank("expert_gtp_weight_remat", '"egtp_remat"'),
        Row(f"get_expert_gtp_weight_remat_global_ranks({_CHECK})", 'list(mesh.ranks("egtp_remat"))'),
        *_variables(gathered=True),
        Row(
            "_inject_gtp_remat_axis(order_str, after='tp')",
            note="the axes of a mesh are named in their order: gtp_remat stands before tp, and egtp_remat before ep",
        ),
        Row(
            "create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None)",
            '(mesh.group("dp_cp_gather"), None)',
            "of the experts likewise: a view with an axis of its own and share=False",
        ),
    ],
    "Sequence parallelism of Megatron-DeepSpeed": [
        Row("get_sequence_parallel_group()", 'mesh.group("sp")'),
        *size_and_rank("sequence_parallel", '"sp"', src=True),
        Row("get_sequence_data_parallel_group()", 'mesh.group("dp", "sp")'),
        *size_and_rank("sequence_data_parallel", '"dp", "sp"'),
        Row("sequence_parallel_is_initialized()", '"sp" in mesh.coords'),
        Row("sequence_data_parallel_is_initialized()", '"sp" in mesh.coords'),
    ],
    "What stays": [
        *(Row(f"set_{axis}_rank(rank)", note=OVERRIDE) for axis in _OVERRIDABLE),
        *(Row(f"set_{axis}_world_size(world_size)", note=OVERRIDE) for axis in _OVERRIDABLE[1:]),
        Row("set_virtual_pipeline_model_parallel_rank(rank)", note=_OWN_STAGE),
        Row("set_virtual_pipeline_model_parallel_world_size(world_size)", note=_OWN_STAGE),
        Row("get_global_memory_buffer()", note=_BUFFER),
        Row("destroy_global_memory_buffer()", note=_BUFFER),
        Row("get_global_symmetric_memory_buffer()", note=_SYMMETRIC),
        Row("destroy_global_symmetric_memory_buffer()", note=_SYMMETRIC),
    ],
    "Private names, when they are read": [
        *_variables(gathered=False),
        Row("_global_process_group_list", "[held.group for held in mesh.communicators]"),
        *(Row(f"_MPU_{axis.upper()}_RANK", note=_OVERRIDDEN) for axis in _OVERRIDABLE),
        *(Row(f"_MPU_{axis.upper()}_WORLD_SIZE", note=_OVERRIDDEN) for axis in _OVERRIDABLE),
        Row("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", note=OWN_VARIABLE),
        Row("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", note=OWN_VARIABLE),
        Row("_GLOBAL_MEMORY_BUFFER", note=_BUFFER_VARIABLE),
        Row("_GLOBAL_SYMMETRIC_MEMORY_BUFFER", note=_BUFFER_VARIABLE),
        Row("_set_global_memory_buffer()", note=_BUFFER_VARIABLE),
        Row("_set_global_symmetric_memory_buffer()", note=_BUFFER_VARIABLE),
    ],
}
"""The rows of Megatron, by the sections of the page."""

TABLE: dict[str, Row] = {row.name: row for rows in SECTIONS.values() for row in rows}
"""The rows of Megatron, by legacy name."""
