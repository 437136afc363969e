"""The module-level names of Megatron's ``parallel_state`` that other code reads or assigns.

Each reads as a mesh call does. Assigning one patches the dialect's module, and stays there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.migrate.builders import group_value, stays, value
from namedmesh.migrate.once import (
    EMBEDDING,
    EXPERT,
    EXPERT_OPTIMIZER,
    EXPERT_OPTIMIZER_TWIN,
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

__all__ = ["ASSIGNED", "PRIVATE"]

ASSIGNED = (
    "an assignment patches what the legacy calls answer and no mesh; where a test stands in for groups, give it a mesh "
    "of its own, adopted with NamedMesh.from_groups({'tp': group, ...})"
)
"""What to know where a name is assigned, deleted or patched."""

_OVERRIDES = (
    "an override that set_... assigns, None otherwise; what it overrides is mesh.rank(...) or mesh.size(...)"
)
_BUFFERS = "torch.empty(...): torch's allocator hands freed memory out again"
_VIRTUAL = "keep the number in a variable of your own"


PRIVATE: tuple[Entry, ...] = (
    group_value("_TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    group_value("_PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    group_value("_CONTEXT_PARALLEL_GROUP", "cp"),
    group_value("_DATA_PARALLEL_GROUP", "dp"),
    group_value("_DATA_PARALLEL_GROUP_WITH_CP", "dp", "cp"),
    value("_DATA_PARALLEL_GROUP_WITH_CP_AG", 'mesh.group("dp_cp_gather")', GATHER),
    group_value("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp_shard", once=(OPTIMIZER,)),
    value("_DATA_PARALLEL_GROUP_GLOO", 'mesh.gloo_group("dp")', note=twin_note("dp")),
    value(
        "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        'mesh.gloo_group("dp", "cp")',
        flatten("dp", "cp"),
        note=twin_note("dp"),
    ),
    value(
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        'mesh.gloo_group("dp_shard")',
        OPTIMIZER,
        note=twin_note("dp_shard"),
    ),
    group_value("_MODEL_PARALLEL_GROUP", "pp", "tp"),
    group_value("_TENSOR_AND_DATA_PARALLEL_GROUP", "dp", "tp"),
    group_value("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "dp", "cp", "tp"),
    group_value("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "cp", "tp"),
    value(
        "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
        '[mesh.group("cp_inner"), mesh.group("cp_outer")]',
        LEVELS,
    ),
    value("_HYBRID_DP_CP_GROUPS", '{mesh.size("hybrid"): mesh.group("hybrid")}', HYBRID),
    value("_EMBEDDING_GROUP", "embedding_group", EMBEDDING),
    value("_POSITION_EMBEDDING_GROUP", "position_embedding_group", POSITION_EMBEDDING),
    group_value("_EXPERT_MODEL_PARALLEL_GROUP", "ep", once=(EXPERT,)),
    group_value("_EXPERT_TENSOR_PARALLEL_GROUP", "etp", once=(EXPERT,)),
    group_value("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep", "etp", once=(EXPERT,)),
    group_value("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "pp", "ep", "etp", once=(EXPERT,)),
    group_value("_EXPERT_DATA_PARALLEL_GROUP", "edp", once=(EXPERT,)),
    value("_EXPERT_DATA_PARALLEL_GROUP_GLOO", 'mesh.gloo_group("edp")', EXPERT, note=twin_note("edp")),
    group_value("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "edp_shard", once=(EXPERT, EXPERT_OPTIMIZER)),
    value(
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
        'mesh.gloo_group("edp_shard")',
        EXPERT,
        EXPERT_OPTIMIZER_TWIN,
    ),
    group_value(
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "edp_replicate", once=(EXPERT, EXPERT_OPTIMIZER)
    ),
    group_value(
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "pp",
        "edp_shard",
        "ep",
        "etp",
        once=(EXPERT, EXPERT_OPTIMIZER),
    ),
    value("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("tp"))'),
    value("_PIPELINE_GLOBAL_RANKS", 'list(mesh.ranks("pp"))'),
    value("_CONTEXT_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("cp"))'),
    value("_DATA_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("dp"))'),
    value("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", 'list(mesh.ranks("dp", "cp"))'),
    value("_MODEL_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("pp", "tp"))'),
    value("_EXPERT_MODEL_PARALLEL_RANKS", 'list(mesh.ranks("ep"))', EXPERT),
    value(
        "_EMBEDDING_GLOBAL_RANKS",
        'sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]})',
        note="Megatron has None on the other ranks",
    ),
    value(
        "_POSITION_EMBEDDING_GLOBAL_RANKS",
        '[mesh.ranks("pp")[0]]',
        note="Megatron has None on the other ranks",
    ),
    value("_global_process_group_list", "[held.group for held in mesh.communicators]"),
    *(
        stays(f"_MPU_{axis}_{what}", _OVERRIDES, parameters=None)
        for axis in (
            "DATA_PARALLEL",
            "TENSOR_MODEL_PARALLEL",
            "PIPELINE_MODEL_PARALLEL",
            "EXPERT_MODEL_PARALLEL",
            "EXPERT_TENSOR_PARALLEL",
        )
        for what in ("RANK", "WORLD_SIZE")
    ),
    stays("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", _VIRTUAL, parameters=None),
    stays("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", _VIRTUAL, parameters=None),
    stays("_GLOBAL_MEMORY_BUFFER", _BUFFERS, parameters=None),
    stays("_GLOBAL_SYMMETRIC_MEMORY_BUFFER", _BUFFERS, parameters=None),
    stays("_set_global_memory_buffer", _BUFFERS),
    stays("_set_global_symmetric_memory_buffer", _BUFFERS),
)
"""The entries of the private names."""
