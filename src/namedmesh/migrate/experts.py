"""The names that ask about experts, and their mesh calls on a view of the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.migrate.builders import function, group, numbers, variant
from namedmesh.migrate.once import EXPERT, EXPERT_OPTIMIZER, EXPERT_OPTIMIZER_TWIN, twin_note

if TYPE_CHECKING:
    from namedmesh.migrate.rules import Entry

__all__ = ["DEPRECATED", "EXPERTS"]

DEPRECATED = "deprecated in Megatron too"


def _expert_data_numbers(what: str, answer: str) -> Entry:
    return function(
        f"get_expert_data_parallel_{what}",
        variant(f'mesh.{answer}("edp_shard")', EXPERT, EXPERT_OPTIMIZER, partial_expert_data_parallel=True),
        variant(f'mesh.{answer}("edp")', EXPERT),
    )


EXPERTS: tuple[Entry, ...] = (
    group("expert_model_parallel", "ep", once=(EXPERT,)),
    group("expert_tensor_parallel", "etp", once=(EXPERT,)),
    group("expert_tensor_and_model_parallel", "ep", "etp", once=(EXPERT,)),
    group("expert_tensor_model_pipeline_parallel", "pp", "ep", "etp", once=(EXPERT,)),
    function(
        "get_expert_data_parallel_group",
        variant('mesh.group("edp_shard")', EXPERT, EXPERT_OPTIMIZER, partial_expert_data_parallel=True),
        variant('mesh.group("edp")', EXPERT),
        parameters=("check_initialized", "partial_expert_data_parallel"),
    ),
    function(
        "get_data_modulo_expert_parallel_group",
        variant(
            'mesh.group("edp_shard")',
            EXPERT,
            EXPERT_OPTIMIZER,
            note=DEPRECATED,
            partial_expert_data_parallel=True,
        ),
        variant('mesh.group("edp")', EXPERT, note=DEPRECATED),
    ),
    function(
        "get_expert_data_parallel_group_gloo",
        variant(
            'mesh.gloo_group("edp_shard")',
            EXPERT,
            EXPERT_OPTIMIZER_TWIN,
            partial_expert_data_parallel=True,
        ),
        variant('mesh.gloo_group("edp")', EXPERT, note=twin_note("edp")),
    ),
    group(
        "intra_distributed_optimizer_instance",
        "pp",
        "edp_shard",
        "ep",
        "etp",
        once=(EXPERT, EXPERT_OPTIMIZER),
    ),
    group("inter_distributed_optimizer_instance", "edp_replicate", once=(EXPERT, EXPERT_OPTIMIZER)),
    *numbers("expert_model_parallel", "ep", once=(EXPERT,)),
    *numbers("expert_tensor_parallel", "etp", once=(EXPERT,)),
    *numbers("expert_tensor_and_model_parallel", "ep", "etp", once=(EXPERT,)),
    _expert_data_numbers("world_size", "size"),
    _expert_data_numbers("rank", "rank"),
    function("get_expert_model_parallel_src_rank", variant('mesh.ranks("ep")[0]', EXPERT)),
)
