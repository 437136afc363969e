"""The names that make groups, rank lists and options by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.migrate.builders import function, value, variant
from namedmesh.migrate.initialize import rank_generator
from namedmesh.migrate.once import HYBRID, LEVELS
from namedmesh.migrate.rules import DIALECT

if TYPE_CHECKING:
    from namedmesh.migrate.rules import Entry

__all__ = ["BY_HAND"]

BY_HAND: tuple[Entry, ...] = (
    rank_generator(),
    function(
        "generate_masked_orthogonal_rank_groups",
        variant(
            'namedmesh.Layout.from_order("tp-dp-pp", tp=2, dp=3, pp=4).groups("dp")',
            note="names in place of the mask; like parallel_size, the order string has the fastest axis first",
        ),
        parameters=("world_size", "parallel_size", "mask"),
        examples=("generate_masked_orthogonal_rank_groups(24, [2, 3, 4], [False, True, False])",),
    ),
    function(
        "create_group",
        variant(
            "torch.distributed.new_group({ranks})",
            note="torch's function takes the same keywords; ranks that are a product of axes need no new group: "
            "mesh.flatten(...) or mesh.add_view(...)",
        ),
        parameters=("ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc"),
        examples=("create_group(ranks)",),
    ),
    function(
        "create_hierarchical_groups",
        variant(
            '[mesh.group("cp_inner"), mesh.group("cp_outer")]',
            LEVELS,
            note="one axis of a view for each level, the first level innermost",
        ),
        parameters=(
            "rank",
            "ranks",
            "hierarchical_group_sizes",
            "create_gloo_process_groups",
            "pg_options",
            "timeout",
            "group_desc",
        ),
        examples=("create_hierarchical_groups(rank, ranks, hierarchical_group_sizes)",),
    ),
    function(
        "create_hybrid_dp_cp_groups",
        variant(
            '{mesh.size("hybrid"): mesh.group("hybrid")}', HYBRID, note="a view for each size that is used"
        ),
        parameters=("rank", "ranks", "pg_options"),
        examples=("create_hybrid_dp_cp_groups(rank, ranks, pg_options)",),
    ),
    function(
        "get_nccl_options",
        variant(
            "namedmesh.GroupOptions.from_yaml(nccl_communicator_config_path)",
            note="options by axis, for options= of init_mesh and add_view; the keys of the file are axes: ep_tp is etp, "
            "ep_dp is edp, mp is pp_tp, tp_dp is dp_tp, tp_cp is cp_tp, tp_dp_cp is dp_cp_tp",
        ),
        parameters=("pg_name", "nccl_comm_cfgs"),
        examples=("get_nccl_options(pg_name, nccl_comm_cfgs)",),
    ),
    function(
        "overwrite_nccl_comm_cfgs",
        variant(
            "namedmesh.GroupOptions(high_priority=True)",
            note='set what the pair sets, and pass it as options={"tp": ...}, under the name of the axis',
        ),
        parameters=("nccl_comm_cfgs", "pg_name", "key_value_pair"),
        examples=("overwrite_nccl_comm_cfgs(nccl_comm_cfgs, 'tp', ('is_high_priority_stream', True))",),
    ),
    function(
        "update_pg_timeout",
        variant(
            "namedmesh.GroupOptions(timeout={timeout})",
            note="a group is given its timeout when it is made: timeout= or options= of init_mesh; to change it on "
            f"live groups, stay with {DIALECT}",
        ),
        parameters=("timeout", "pg"),
        examples=("update_pg_timeout(timeout)",),
    ),
    value("logger", 'logging.getLogger("namedmesh")'),
)
