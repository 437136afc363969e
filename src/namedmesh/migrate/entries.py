"""The public names of Megatron's ``parallel_state``, and the mesh call for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.migrate.builders import function, group, numbers, stays, variant
from namedmesh.migrate.by_hand import BY_HAND
from namedmesh.migrate.experts import DEPRECATED, EXPERTS
from namedmesh.migrate.initialize import started
from namedmesh.migrate.once import (
    EMBEDDING,
    EXPERT,
    GATHER,
    HYBRID,
    LEVELS,
    OPTIMIZER,
    POSITION_EMBEDDING,
    flatten,
    twin_note,
)

if TYPE_CHECKING:
    from namedmesh.migrate.rules import Entry

__all__ = ["PUBLIC"]

_CP = "with_context_parallel"
_DATA = (_CP, "partial_data_parallel")
_STAGE = ("ignore_virtual", "vp_stage")
_VIRTUAL = (
    "virtual_stages is a number of your own: how many virtual stages a rank has; torch's schedules count stages, not "
    "a rank in a virtual pipeline"
)
_ONE_MESH = (
    "several meshes can be alive; code that was given none asks namedmesh.current_mesh(), which raises MeshError "
    "where there is none"
)
_BUFFER = "torch.empty(shape, dtype=dtype, device=mesh.device) does the same: torch's allocator hands freed memory out again"
_SYMMETRIC = "it wraps torch's symmetric memory, over mesh.group('tp')"
_OVERRIDE = (
    "it overrides an answer and makes no group: make a second mesh of the sizes wanted (over part of the world with "
    "part=True) and select it with 'with mesh:'"
)
_OWN_STAGE = "keep the number in a variable of your own and pass it to what needs it"


def _data_numbers(what: str, answer: str) -> Entry:
    return function(
        f"get_data_parallel_{what}",
        variant(
            f'mesh.{answer}("dp_shard")', OPTIMIZER, with_context_parallel=True, partial_data_parallel=True
        ),
        variant(f'mesh.{answer}("dp", "cp")', with_context_parallel=True),
        f'mesh.{answer}("dp")',
        parameters=_DATA,
    )


_GROUPS = (
    group("tensor_model_parallel", "tp"),
    group("pipeline_model_parallel", "pp"),
    group("context_parallel", "cp"),
    function(
        "get_data_parallel_group",
        variant('mesh.group("dp_shard")', OPTIMIZER, with_context_parallel=True, partial_data_parallel=True),
        variant(
            'mesh.group("dp_cp_gather")',
            GATHER,
            note="a second communicator over the ranks of dp and cp, because of share=False",
            with_context_parallel=True,
            independent_all_gather=True,
        ),
        variant('mesh.group("dp", "cp")', flatten("dp", "cp"), with_context_parallel=True),
        'mesh.group("dp")',
        parameters=(*_DATA, "independent_all_gather"),
    ),
    function(
        "get_data_parallel_group_gloo",
        variant(
            'mesh.gloo_group("dp_shard")',
            OPTIMIZER,
            note=twin_note("dp_shard"),
            with_context_parallel=True,
            partial_data_parallel=True,
        ),
        variant(
            'mesh.gloo_group("dp", "cp")',
            flatten("dp", "cp"),
            note=twin_note("dp"),
            with_context_parallel=True,
        ),
        variant('mesh.gloo_group("dp")', note=twin_note("dp")),
        parameters=_DATA,
    ),
    function(
        "has_separate_all_gather_group",
        variant(
            '"gather" in mesh.views', note="the view is the one that independent_all_gather=True goes with"
        ),
    ),
    group("model_parallel", "pp", "tp"),
    function(
        "get_tensor_and_data_parallel_group",
        variant('mesh.group("dp", "cp", "tp")', flatten("dp", "cp", "tp"), with_context_parallel=True),
        variant('mesh.group("dp", "tp")', flatten("dp", "tp")),
        parameters=("check_initialized", _CP),
    ),
    group("tensor_and_context_parallel", "cp", "tp"),
    function(
        "get_amax_reduction_group",
        variant(
            'mesh.group("cp", "tp")', flatten("cp", "tp"), with_context_parallel=True, tp_only_amax_red=True
        ),
        variant('mesh.group("dp", "cp", "tp")', flatten("dp", "cp", "tp"), with_context_parallel=True),
        variant('mesh.group("tp")', tp_only_amax_red=True),
        variant('mesh.group("dp", "tp")', flatten("dp", "tp")),
        parameters=(_CP, "tp_only_amax_red"),
    ),
    function(
        "get_hierarchical_context_parallel_groups",
        variant('[mesh.group("cp_inner"), mesh.group("cp_outer")]', LEVELS),
        parameters=("check_initialized",),
    ),
    function(
        "get_hybrid_data_context_parallel_groups",
        variant(
            'mesh.group("hybrid")',
            HYBRID.replace("=group_size", "={group_size}"),
            note="one view, with names of its own, for each group_size; as large as dp and cp together it is "
            'mesh.group("dp", "cp")',
        ),
        parameters=("check_initialized", "group_size"),
        examples=("get_hybrid_data_context_parallel_groups(group_size=group_size)",),
    ),
    function("get_embedding_group", variant("embedding_group", EMBEDDING), parameters=("check_initialized",)),
    function(
        "get_position_embedding_group",
        variant("position_embedding_group", POSITION_EMBEDDING),
        parameters=("check_initialized",),
    ),
)

_NUMBERS = (
    *numbers("tensor_model_parallel", "tp"),
    *numbers("pipeline_model_parallel", "pp"),
    *numbers("context_parallel", "cp"),
    _data_numbers("world_size", "size"),
    _data_numbers("rank", "rank"),
    *numbers("tensor_and_context_parallel", "cp", "tp"),
    function("get_tensor_model_parallel_src_rank", 'mesh.ranks("tp")[0]'),
    function("get_model_parallel_src_rank", 'mesh.ranks("pp", "tp")[0]'),
    function(
        "get_data_parallel_src_rank",
        variant('mesh.ranks("dp", "cp")[0]', with_context_parallel=True),
        'mesh.ranks("dp")[0]',
    ),
    function(
        "get_context_parallel_global_ranks", 'list(mesh.ranks("cp"))', parameters=("check_initialized",)
    ),
    function("get_pipeline_model_parallel_first_rank", 'mesh.ranks("pp")[0]'),
    function("get_pipeline_model_parallel_last_rank", 'mesh.ranks("pp")[-1]'),
    function("get_pipeline_model_parallel_next_rank", 'mesh.next("pp")'),
    function("get_pipeline_model_parallel_prev_rank", 'mesh.prev("pp")'),
    function(
        "get_all_ranks",
        variant(
            '"_".join(str(mesh.rank(axis)) for axis in ("tp", "dp", "cp", "pp", "ep"))',
            EXPERT,
            note="mesh.coords has the same by name",
        ),
    ),
)


def _stage(name: str, virtual: str, plain: str) -> Entry:
    note = _VIRTUAL if "virtual_stages" in virtual else ""
    return function(
        name,
        variant(virtual, note=note, ignore_virtual=False),
        plain,
        parameters=_STAGE,
        examples=(f"{name}(ignore_virtual=False, vp_stage=stage)", f"{name}()"),
    )


_STAGES = (
    _stage("is_pipeline_first_stage", 'mesh.is_first("pp") and {vp_stage} == 0', 'mesh.is_first("pp")'),
    _stage(
        "is_pipeline_last_stage",
        'mesh.is_last("pp") and {vp_stage} == virtual_stages - 1',
        'mesh.is_last("pp")',
    ),
    _stage(
        "is_rank_in_embedding_group",
        '(mesh.is_first("pp") and {vp_stage} == 0) or (mesh.is_last("pp") and {vp_stage} == virtual_stages - 1)',
        'mesh.is_first("pp") or mesh.is_last("pp")',
    ),
    function("is_rank_in_position_embedding_group", 'mesh.is_first("pp")'),
    function(
        "default_embedding_ranks",
        'sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]})',
        parameters=("pp_ranks",),
        examples=("default_embedding_ranks(pp_ranks)",),
    ),
    function(
        "default_position_embedding_ranks",
        '[mesh.ranks("pp")[0]]',
        parameters=("pp_ranks",),
        examples=("default_position_embedding_ranks(pp_ranks)",),
    ),
    stays("get_virtual_pipeline_model_parallel_rank", _OWN_STAGE),
    stays("get_virtual_pipeline_model_parallel_world_size", _OWN_STAGE),
)

_LIFE = (
    started(),
    function("is_initialized", variant("not mesh.closed", note=_ONE_MESH)),
    function("is_unitialized", variant("mesh.closed", note=DEPRECATED)),
    function("model_parallel_is_initialized", variant("not mesh.closed", note=_ONE_MESH)),
    function(
        "destroy_model_parallel",
        variant(
            "mesh.close()", note="it destroys the groups that the mesh made, where Megatron only forgets them"
        ),
    ),
)

_OVERRIDES = tuple(
    stays(f"set_{axis}_{what}", _OVERRIDE, parameters=(what,))
    for what in ("rank", "world_size")
    for axis in (
        "data_parallel",
        "tensor_model_parallel",
        "pipeline_model_parallel",
        "expert_model_parallel",
        "expert_tensor_parallel",
    )
    if (axis, what) != ("data_parallel", "world_size")
)

_STAYING = (
    *_OVERRIDES,
    stays("set_virtual_pipeline_model_parallel_rank", _OWN_STAGE, parameters=("rank",)),
    stays("set_virtual_pipeline_model_parallel_world_size", _OWN_STAGE, parameters=("world_size",)),
    stays("get_global_memory_buffer", _BUFFER),
    stays("destroy_global_memory_buffer", _BUFFER),
    stays("get_global_symmetric_memory_buffer", _SYMMETRIC),
    stays("destroy_global_symmetric_memory_buffer", _SYMMETRIC),
)

PUBLIC: dict[str, tuple[Entry, ...]] = {
    "Making and closing": _LIFE,
    "Groups": _GROUPS,
    "Sizes and ranks": _NUMBERS,
    "Stages": _STAGES,
    "Experts": EXPERTS,
    "Making groups by hand": BY_HAND,
    "What stays": _STAYING,
}
"""The entries of the public names, by the sections of the page."""
