"""From Megatron's ``parallel_state`` to a mesh, call by call.

This page lists every name of ``megatron.core.parallel_state`` beside the expression on a
:class:`namedmesh.NamedMesh` that gives the same answer. ``python -m namedmesh migrate PATH`` finds the calls in a
code base and prints the line of the page for each. It reads the code and changes nothing.

Step by step
------------

1. Keep everything running: ``import namedmesh.compat.megatron; namedmesh.compat.megatron.install()``, before the
   first import of ``megatron.core``. Unmodified code now asks ``namedmesh.compat.megatron.parallel_state``.
2. Make the mesh where the code called ``initialize_model_parallel``, and bind it:
   ``mesh = namedmesh.init_mesh(pp=4, dp=-1, tp=2)``, then ``namedmesh.compat.megatron.bind(mesh)``. Old and new
   calls answer from the same process groups. Axes are slowest first; Megatron's order string is fastest first.
3. Run once, on every rank, what the remarks of the table call *once*. Afterwards every call is a look-up.
4. Move call by call, in any order, with tests in between. ``namedmesh.current_mesh()`` finds the mesh where it was
   not passed on.
5. When ``migrate`` finds nothing any more: ``namedmesh.compat.megatron.uninstall()``.

How to read the table
---------------------

``mesh`` is the mesh. A number in brackets is a remark below. *stays* marks what has no replacement on a mesh: it goes
on working in ``namedmesh.compat.megatron.parallel_state``, and the remark says what to do in the long run. So does an
assignment to a private name, which patches that module. The *once* statements are written for Megatron's default order
``tp-cp-ep-dp-pp``; with another one, give the sizes of a view in the order of the mesh.

Making and closing
------------------

    initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
                                                              namedmesh.init_mesh(pp=4, dp=-1, tp=2) [1]
    initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
                                                              namedmesh.init_mesh(pp=1, dp=-1, cp=2, tp=2)
    initialize_model_parallel(tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
                                                              namedmesh.init_mesh(pp=1, dp=-1, tp=2) [2] [1]
    initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=4, order='tp-pp-dp')
                                                              namedmesh.init_mesh(dp=-1, pp=4, tp=2) [1]
    initialize_model_parallel(distributed_timeout_minutes=10)
                                                              namedmesh.init_mesh(pp=1, dp=-1, tp=1, timeout=datetime.timedelta(minutes=10)) [1]
    is_initialized()                                          not mesh.closed [3]
    is_unitialized()                                          mesh.closed [4]
    model_parallel_is_initialized()                           not mesh.closed [3]
    destroy_model_parallel()                                  mesh.close() [5]

Groups
------

    get_tensor_model_parallel_group()                         mesh.group("tp")
    get_pipeline_model_parallel_group()                       mesh.group("pp")
    get_context_parallel_group()                              mesh.group("cp")
    get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
                                                              mesh.group("dp_shard") [6]
    get_data_parallel_group(with_context_parallel=True, independent_all_gather=True)
                                                              mesh.group("dp_cp_gather") [7] [8]
    get_data_parallel_group(with_context_parallel=True)       mesh.group("dp", "cp") [9]
    get_data_parallel_group()                                 mesh.group("dp")
    get_data_parallel_group_gloo(with_context_parallel=True, partial_data_parallel=True)
                                                              mesh.gloo_group("dp_shard") [6] [10]
    get_data_parallel_group_gloo(with_context_parallel=True)  mesh.gloo_group("dp", "cp") [9] [11]
    get_data_parallel_group_gloo()                            mesh.gloo_group("dp") [11]
    has_separate_all_gather_group()                           "gather" in mesh.views [12]
    get_model_parallel_group()                                mesh.group("pp", "tp") [13]
    get_tensor_and_data_parallel_group(with_context_parallel=True)
                                                              mesh.group("dp", "cp", "tp") [14]
    get_tensor_and_data_parallel_group()                      mesh.group("dp", "tp") [15]
    get_tensor_and_context_parallel_group()                   mesh.group("cp", "tp") [16]
    get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=True)
                                                              mesh.group("cp", "tp") [16]
    get_amax_reduction_group(with_context_parallel=True)      mesh.group("dp", "cp", "tp") [14]
    get_amax_reduction_group(tp_only_amax_red=True)           mesh.group("tp")
    get_amax_reduction_group()                                mesh.group("dp", "tp") [15]
    get_hierarchical_context_parallel_groups()                [mesh.group("cp_inner"), mesh.group("cp_outer")] [17]
    get_hybrid_data_context_parallel_groups(group_size=group_size)
                                                              mesh.group("hybrid") [18] [19]
    get_embedding_group()                                     embedding_group [20]
    get_position_embedding_group()                            position_embedding_group [21]

Sizes and ranks
---------------

    get_tensor_model_parallel_world_size()                    mesh.size("tp")
    get_tensor_model_parallel_rank()                          mesh.rank("tp")
    get_pipeline_model_parallel_world_size()                  mesh.size("pp")
    get_pipeline_model_parallel_rank()                        mesh.rank("pp")
    get_context_parallel_world_size()                         mesh.size("cp")
    get_context_parallel_rank()                               mesh.rank("cp")
    get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True)
                                                              mesh.size("dp_shard") [6]
    get_data_parallel_world_size(with_context_parallel=True)  mesh.size("dp", "cp")
    get_data_parallel_world_size()                            mesh.size("dp")
    get_data_parallel_rank(with_context_parallel=True, partial_data_parallel=True)
                                                              mesh.rank("dp_shard") [6]
    get_data_parallel_rank(with_context_parallel=True)        mesh.rank("dp", "cp")
    get_data_parallel_rank()                                  mesh.rank("dp")
    get_tensor_and_context_parallel_world_size()              mesh.size("cp", "tp")
    get_tensor_and_context_parallel_rank()                    mesh.rank("cp", "tp")
    get_tensor_model_parallel_src_rank()                      mesh.ranks("tp")[0]
    get_model_parallel_src_rank()                             mesh.ranks("pp", "tp")[0]
    get_data_parallel_src_rank(with_context_parallel=True)    mesh.ranks("dp", "cp")[0]
    get_data_parallel_src_rank()                              mesh.ranks("dp")[0]
    get_context_parallel_global_ranks()                       list(mesh.ranks("cp"))
    get_pipeline_model_parallel_first_rank()                  mesh.ranks("pp")[0]
    get_pipeline_model_parallel_last_rank()                   mesh.ranks("pp")[-1]
    get_pipeline_model_parallel_next_rank()                   mesh.next("pp")
    get_pipeline_model_parallel_prev_rank()                   mesh.prev("pp")
    get_all_ranks()                                           "_".join(str(mesh.rank(axis)) for axis in ("tp", "dp", "cp", "pp", "ep")) [22] [23]

Stages
------

    is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
                                                              mesh.is_first("pp") and stage == 0
    is_pipeline_first_stage()                                 mesh.is_first("pp")
    is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
                                                              mesh.is_last("pp") and stage == virtual_stages - 1 [24]
    is_pipeline_last_stage()                                  mesh.is_last("pp")
    is_rank_in_embedding_group(ignore_virtual=False, vp_stage=stage)
                                                              (mesh.is_first("pp") and stage == 0) or (mesh.is_last("pp") and stage == virtual_stages - 1) [24]
    is_rank_in_embedding_group()                              mesh.is_first("pp") or mesh.is_last("pp")
    is_rank_in_position_embedding_group()                     mesh.is_first("pp")
    default_embedding_ranks(pp_ranks)                         sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]})
    default_position_embedding_ranks(pp_ranks)                [mesh.ranks("pp")[0]]
    get_virtual_pipeline_model_parallel_rank()                stays [25]
    get_virtual_pipeline_model_parallel_world_size()          stays [25]

Experts
-------

    get_expert_model_parallel_group()                         mesh.group("ep") [22]
    get_expert_tensor_parallel_group()                        mesh.group("etp") [22]
    get_expert_tensor_and_model_parallel_group()              mesh.group("ep", "etp") [22] [26]
    get_expert_tensor_model_pipeline_parallel_group()         mesh.group("pp", "ep", "etp") [22] [27]
    get_expert_data_parallel_group(partial_expert_data_parallel=True)
                                                              mesh.group("edp_shard") [22] [28]
    get_expert_data_parallel_group()                          mesh.group("edp") [22]
    get_data_modulo_expert_parallel_group(partial_expert_data_parallel=True)
                                                              mesh.group("edp_shard") [22] [28] [4]
    get_data_modulo_expert_parallel_group()                   mesh.group("edp") [22] [4]
    get_expert_data_parallel_group_gloo(partial_expert_data_parallel=True)
                                                              mesh.gloo_group("edp_shard") [22] [29]
    get_expert_data_parallel_group_gloo()                     mesh.gloo_group("edp") [22] [30]
    get_intra_distributed_optimizer_instance_group()          mesh.group("pp", "edp_shard", "ep", "etp") [22] [28] [31]
    get_inter_distributed_optimizer_instance_group()          mesh.group("edp_replicate") [22] [28]
    get_expert_model_parallel_world_size()                    mesh.size("ep") [22]
    get_expert_model_parallel_rank()                          mesh.rank("ep") [22]
    get_expert_tensor_parallel_world_size()                   mesh.size("etp") [22]
    get_expert_tensor_parallel_rank()                         mesh.rank("etp") [22]
    get_expert_tensor_and_model_parallel_world_size()         mesh.size("ep", "etp") [22]
    get_expert_tensor_and_model_parallel_rank()               mesh.rank("ep", "etp") [22]
    get_expert_data_parallel_world_size(partial_expert_data_parallel=True)
                                                              mesh.size("edp_shard") [22] [28]
    get_expert_data_parallel_world_size()                     mesh.size("edp") [22]
    get_expert_data_parallel_rank(partial_expert_data_parallel=True)
                                                              mesh.rank("edp_shard") [22] [28]
    get_expert_data_parallel_rank()                           mesh.rank("edp") [22]
    get_expert_model_parallel_src_rank()                      mesh.ranks("ep")[0] [22]

Making groups by hand
---------------------

    RankGenerator(tp=2, ep=1, dp=3, pp=4, cp=1, order='tp-dp-pp')
                                                              namedmesh.Layout.from_order('tp-dp-pp', tp=2, ep=1, dp=3, pp=4, cp=1) [32]
    generate_masked_orthogonal_rank_groups(24, [2, 3, 4], [False, True, False])
                                                              namedmesh.Layout.from_order("tp-dp-pp", tp=2, dp=3, pp=4).groups("dp") [33]
    create_group(ranks)                                       torch.distributed.new_group(ranks) [34]
    create_hierarchical_groups(rank, ranks, hierarchical_group_sizes)
                                                              [mesh.group("cp_inner"), mesh.group("cp_outer")] [17] [35]
    create_hybrid_dp_cp_groups(rank, ranks, pg_options)       {mesh.size("hybrid"): mesh.group("hybrid")} [18] [36]
    get_nccl_options(pg_name, nccl_comm_cfgs)                 namedmesh.GroupOptions.from_yaml(nccl_communicator_config_path) [37]
    overwrite_nccl_comm_cfgs(nccl_comm_cfgs, 'tp', ('is_high_priority_stream', True))
                                                              namedmesh.GroupOptions(high_priority=True) [38]
    update_pg_timeout(timeout)                                namedmesh.GroupOptions(timeout=timeout) [39]
    logger                                                    logging.getLogger("namedmesh")

What stays
----------

    set_data_parallel_rank(rank)                              stays [40]
    set_tensor_model_parallel_rank(rank)                      stays [40]
    set_pipeline_model_parallel_rank(rank)                    stays [40]
    set_expert_model_parallel_rank(rank)                      stays [40]
    set_expert_tensor_parallel_rank(rank)                     stays [40]
    set_tensor_model_parallel_world_size(world_size)          stays [40]
    set_pipeline_model_parallel_world_size(world_size)        stays [40]
    set_expert_model_parallel_world_size(world_size)          stays [40]
    set_expert_tensor_parallel_world_size(world_size)         stays [40]
    set_virtual_pipeline_model_parallel_rank(rank)            stays [25]
    set_virtual_pipeline_model_parallel_world_size(world_size)
                                                              stays [25]
    get_global_memory_buffer()                                stays [41]
    destroy_global_memory_buffer()                            stays [41]
    get_global_symmetric_memory_buffer()                      stays [42]
    destroy_global_symmetric_memory_buffer()                  stays [42]

Private names, when they are read
---------------------------------

    _TENSOR_MODEL_PARALLEL_GROUP                              mesh.group("tp")
    _PIPELINE_MODEL_PARALLEL_GROUP                            mesh.group("pp")
    _CONTEXT_PARALLEL_GROUP                                   mesh.group("cp")
    _DATA_PARALLEL_GROUP                                      mesh.group("dp")
    _DATA_PARALLEL_GROUP_WITH_CP                              mesh.group("dp", "cp") [9]
    _DATA_PARALLEL_GROUP_WITH_CP_AG                           mesh.group("dp_cp_gather") [7]
    _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP                mesh.group("dp_shard") [6]
    _DATA_PARALLEL_GROUP_GLOO                                 mesh.gloo_group("dp") [11]
    _DATA_PARALLEL_GROUP_WITH_CP_GLOO                         mesh.gloo_group("dp", "cp") [9] [11]
    _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO           mesh.gloo_group("dp_shard") [6] [10]
    _MODEL_PARALLEL_GROUP                                     mesh.group("pp", "tp") [13]
    _TENSOR_AND_DATA_PARALLEL_GROUP                           mesh.group("dp", "tp") [15]
    _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP                   mesh.group("dp", "cp", "tp") [14]
    _TENSOR_AND_CONTEXT_PARALLEL_GROUP                        mesh.group("cp", "tp") [16]
    _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS                     [mesh.group("cp_inner"), mesh.group("cp_outer")] [17]
    _HYBRID_DP_CP_GROUPS                                      {mesh.size("hybrid"): mesh.group("hybrid")} [18]
    _EMBEDDING_GROUP                                          embedding_group [20]
    _POSITION_EMBEDDING_GROUP                                 position_embedding_group [21]
    _EXPERT_MODEL_PARALLEL_GROUP                              mesh.group("ep") [22]
    _EXPERT_TENSOR_PARALLEL_GROUP                             mesh.group("etp") [22]
    _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP                   mesh.group("ep", "etp") [22] [26]
    _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP              mesh.group("pp", "ep", "etp") [22] [27]
    _EXPERT_DATA_PARALLEL_GROUP                               mesh.group("edp") [22]
    _EXPERT_DATA_PARALLEL_GROUP_GLOO                          mesh.gloo_group("edp") [22] [30]
    _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP                 mesh.group("edp_shard") [22] [28]
    _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO            mesh.gloo_group("edp_shard") [22] [29]
    _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP                 mesh.group("edp_replicate") [22] [28]
    _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP               mesh.group("pp", "edp_shard", "ep", "etp") [22] [28] [31]
    _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS                       list(mesh.ranks("tp"))
    _PIPELINE_GLOBAL_RANKS                                    list(mesh.ranks("pp"))
    _CONTEXT_PARALLEL_GLOBAL_RANKS                            list(mesh.ranks("cp"))
    _DATA_PARALLEL_GLOBAL_RANKS                               list(mesh.ranks("dp"))
    _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP                       list(mesh.ranks("dp", "cp"))
    _MODEL_PARALLEL_GLOBAL_RANKS                              list(mesh.ranks("pp", "tp"))
    _EXPERT_MODEL_PARALLEL_RANKS                              list(mesh.ranks("ep")) [22]
    _EMBEDDING_GLOBAL_RANKS                                   sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]}) [43]
    _POSITION_EMBEDDING_GLOBAL_RANKS                          [mesh.ranks("pp")[0]] [43]
    _global_process_group_list                                [held.group for held in mesh.communicators]
    _MPU_DATA_PARALLEL_RANK                                   stays [44]
    _MPU_DATA_PARALLEL_WORLD_SIZE                             stays [44]
    _MPU_TENSOR_MODEL_PARALLEL_RANK                           stays [44]
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE                     stays [44]
    _MPU_PIPELINE_MODEL_PARALLEL_RANK                         stays [44]
    _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE                   stays [44]
    _MPU_EXPERT_MODEL_PARALLEL_RANK                           stays [44]
    _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE                     stays [44]
    _MPU_EXPERT_TENSOR_PARALLEL_RANK                          stays [44]
    _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE                    stays [44]
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK                     stays [45]
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE               stays [45]
    _GLOBAL_MEMORY_BUFFER                                     stays [46]
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER                           stays [46]
    _set_global_memory_buffer()                               stays [46]
    _set_global_symmetric_memory_buffer()                     stays [46]

Remarks
-------

[1] where anything asks for 'cp', name that axis too: cp=1
[2] once: mesh.add_view("expert", pp=1, edp=-1, ep=4, etp=1)
[3] several meshes can be alive; code that was given none asks namedmesh.current_mesh(), which raises MeshError where there is none
[4] deprecated in Megatron too
[5] it destroys the groups that the mesh made, where Megatron only forgets them
[6] once: mesh.add_view("optimizer", pp=mesh.size("pp"), dp_replicate=num_distributed_optimizer_instances, dp_shard=-1, tp=mesh.size("tp"))
[7] once: mesh.add_view("gather", options={"dp_cp_gather": namedmesh.GroupOptions(share=False)}, pp=mesh.size("pp"), dp_cp_gather=-1, tp=mesh.size("tp"))
[8] a second communicator over the ranks of dp and cp, because of share=False
[9] once: mesh.flatten("dp", "cp")
[10] a gloo group is made where it is asked for: namedmesh.init_mesh(..., options={"dp_shard": namedmesh.GroupOptions(gloo_twin=True)})
[11] a gloo group is made where it is asked for: namedmesh.init_mesh(..., options={"dp": namedmesh.GroupOptions(gloo_twin=True)})
[12] the view is the one that independent_all_gather=True goes with
[13] once: mesh.flatten("pp", "tp")
[14] once: mesh.flatten("dp", "cp", "tp")
[15] once: mesh.flatten("dp", "tp")
[16] once: mesh.flatten("cp", "tp")
[17] once: mesh.add_view("levels", pp=mesh.size("pp"), dp=mesh.size("dp"), cp_outer=-1, cp_inner=hierarchical_context_parallel_sizes[0], tp=mesh.size("tp"))
[18] once: mesh.add_view("hybrid", pp=mesh.size("pp"), hybrid_outer=-1, hybrid=group_size, tp=mesh.size("tp"))
[19] one view, with names of its own, for each group_size; as large as dp and cp together it is mesh.group("dp", "cp")
[20] once: embedding_group = torch.distributed.new_subgroups_by_enumeration([sorted({pipe[0], pipe[-1]}) for pipe in mesh.layout.groups("pp")])[0]
[21] once: position_embedding_group = torch.distributed.new_subgroups_by_enumeration([[pipe[0]] for pipe in mesh.layout.groups("pp")])[0]
[22] once: mesh.add_view("expert", pp=mesh.size("pp"), edp=-1, ep=expert_model_parallel_size, etp=expert_tensor_parallel_size)
[23] mesh.coords has the same by name
[24] virtual_stages is a number of your own: how many virtual stages a rank has; torch's schedules count stages, not a rank in a virtual pipeline
[25] keep the number in a variable of your own and pass it to what needs it
[26] once: mesh.flatten("ep", "etp")
[27] once: mesh.flatten("pp", "ep", "etp")
[28] once: mesh.add_view("expert_optimizer", pp=mesh.size("pp"), edp_replicate=num_distributed_optimizer_instances, edp_shard=-1, ep=mesh.size("ep"), etp=mesh.size("etp"))
[29] once: mesh.add_view("expert_optimizer", options={"edp_shard": namedmesh.GroupOptions(gloo_twin=True)}, pp=mesh.size("pp"), edp_replicate=num_distributed_optimizer_instances, edp_shard=-1, ep=mesh.size("ep"), etp=mesh.size("etp"))
[30] a gloo group is made where it is asked for: namedmesh.init_mesh(..., options={"edp": namedmesh.GroupOptions(gloo_twin=True)})
[31] once: mesh.flatten("pp", "edp_shard", "ep", "etp")
[32] get_ranks('tp-dp') is layout.groups('tp', 'dp')
[33] names in place of the mask; like parallel_size, the order string has the fastest axis first
[34] torch's function takes the same keywords; ranks that are a product of axes need no new group: mesh.flatten(...) or mesh.add_view(...)
[35] one axis of a view for each level, the first level innermost
[36] a view for each size that is used
[37] options by axis, for options= of init_mesh and add_view; the keys of the file are axes: ep_tp is etp, ep_dp is edp, mp is pp_tp, tp_dp is dp_tp, tp_cp is cp_tp, tp_dp_cp is dp_cp_tp
[38] set what the pair sets, and pass it as options={"tp": ...}, under the name of the axis
[39] a group is given its timeout when it is made: timeout= or options= of init_mesh; to change it on live groups, stay with namedmesh.compat.megatron.parallel_state
[40] it overrides an answer and makes no group: make a second mesh of the sizes wanted (over part of the world with part=True) and select it with 'with mesh:'
[41] torch.empty(shape, dtype=dtype, device=mesh.device) does the same: torch's allocator hands freed memory out again
[42] it wraps torch's symmetric memory, over mesh.group('tp')
[43] Megatron has None on the other ranks
[44] an override that set_... assigns, None otherwise; what it overrides is mesh.rank(...) or mesh.size(...)
[45] keep the number in a variable of your own
[46] torch.empty(...): torch's allocator hands freed memory out again
"""

from __future__ import annotations

from namedmesh.migrate.report import as_json, as_text
from namedmesh.migrate.rules import Advice, Entry
from namedmesh.migrate.scan import Finding, Problem, Scan, scan
from namedmesh.migrate.table import TABLE, advise, page

__all__ = [
    "TABLE",
    "Advice",
    "Entry",
    "Finding",
    "Problem",
    "Scan",
    "advise",
    "as_json",
    "as_text",
    "page",
    "scan",
]
