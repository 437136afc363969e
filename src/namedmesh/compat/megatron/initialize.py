"""Bind the dialect to a mesh, make a mesh for it, and destroy both."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec

import torch.distributed as dist

from namedmesh.compat.binding import Bound, require_default_group
from namedmesh.compat.errors import ContractTypeError
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer
from namedmesh.compat.megatron.config import BINDABLE, Factorings, ParallelConfig, bindable
from namedmesh.compat.megatron.groups import OVER_AXES, build_groups, group_options
from namedmesh.compat.megatron.variables import BINDING
from namedmesh.dialects import DENSE, EXPERT
from namedmesh.errors import did_you_mean
from namedmesh.groups import GroupPool, agreed
from namedmesh.init import make_mesh
from namedmesh.launch import default_group_device
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh.mesh import NamedMesh

_P = ParamSpec("_P")


def _takes_fields_of(
    _: Callable[_P, ParallelConfig],
) -> Callable[[Callable[[ParallelConfig], None]], Callable[_P, None]]:
    """Let a function of a :class:`ParallelConfig` take its fields as arguments."""

    def decorate(function: Callable[[ParallelConfig], None]) -> Callable[_P, None]:
        arguments = signature(ParallelConfig)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
            function(ParallelConfig(**arguments.bind(*args, **kwargs).arguments))

        vars(call)["__signature__"] = arguments.replace(return_annotation=None)
        return call

    return decorate


def bind(mesh: NamedMesh, **options: Any) -> Bound:
    """Answer from a mesh that exists; communicates the first time.

    Every rank of the mesh calls it. Groups that the mesh has are used, the others that Megatron knows are made,
    and belong to the mesh. The mesh has axes ``tp``, ``cp`` (or DeepSpeed's ``sp``), ``dp`` (or ``dp_replicate`` and
    ``dp_shard``) and ``pp``, in any order; one that it lacks is of size 1. The experts' are in a view with ``etp``,
    ``ep`` and ``edp``.

    Args:
        mesh: the mesh.
        **options: those arguments of :func:`initialize_model_parallel` that a mesh does not determine:
            ``virtual_pipeline_model_parallel_size``, ``hierarchical_context_parallel_sizes``,
            ``hybrid_context_parallel``, ``num_distributed_optimizer_instances``, ``get_embedding_ranks``,
            ``get_position_embedding_ranks``, ``create_gloo_process_groups`` and ``create_all_gather_group``.

    Returns:
        A handle: in ``with bind(mesh):`` the binding ends with the block. Otherwise it lasts until the next
        one, :func:`unbind`, or the mesh's end.

    Raises:
        LayoutError: the mesh has axes that Megatron does not know.
        MeshError: what was given is no open mesh.
        ContractTypeError: an argument that a mesh determines, or an unknown one.
        ContractError: sizes that do not divide, or ranks outside a pipeline from a callback.
        AgreementError: the other ranks did not call this, or not with the same arguments.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> from namedmesh.compat.megatron import bind, parallel_state
        >>> mesh = namedmesh.init_mesh(pp=1, dp=-1, tp=1, device="cpu")
        >>> with bind(mesh):
        ...     parallel_state.get_tensor_model_parallel_group() is mesh.group("tp")
        True
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    other = [name for name in options if name not in BINDABLE]
    if other:
        raise ContractTypeError(
            *(
                f"bind() takes no {name!r}{did_you_mean(name, BINDABLE)}; it takes {', '.join(BINDABLE)}"
                for name in other
            )
        )
    config = ParallelConfig(**options)
    bound = BINDING.rebind(mesh, bindable(config))
    if bound is not None:
        return bound
    with mesh.agreed("megatron.bind") as maker:
        factorings = Factorings.of_mesh(mesh)
        config.validate_for_mesh(factorings)
        fields = config.fields_to_compare(factorings) | {"views": repr(mesh.views)}
        located = [factorings.locate(row.axes) for row in OVER_AXES]
        maker.compare(fields, [(layout, axes, mesh.options_of(axes)) for layout, axes in located if axes])
        groups = build_groups(mesh, maker, factorings, config)
    return BINDING.take(mesh, bindable(config), groups)


unbind = BINDING.unbind
current_mesh = BINDING.current_mesh


@_takes_fields_of(ParallelConfig)
def initialize_model_parallel(config: ParallelConfig) -> None:  # noqa: D417  the fields of the configuration
    """Make a mesh of Megatron's sizes, with a view of the experts', and bind the accessors to it; communicates.

    Every rank of the world calls it with the same arguments. :func:`current_mesh` returns the mesh. The order of
    arguments is that of release 0.19.

    Args:
        tensor_model_parallel_size: how many ranks share each layer (tp).
        pipeline_model_parallel_size: how many stages the layers are in (pp).
        virtual_pipeline_model_parallel_size: how many virtual stages each rank has; needs pp above 1.
        pipeline_model_parallel_comm_backend: the backend of the pipeline groups: None, "nccl" or "ucc".
        use_sharp: let the switches reduce in the data-parallel groups (SHARP).
        context_parallel_size: how many ranks share each sequence (cp).
        hierarchical_context_parallel_sizes: the sizes of the levels of cp, innermost first.
        hybrid_context_parallel: make a group for each power of two inside dp and cp.
        expert_model_parallel_size: over how many ranks the experts are distributed (ep).
        gtp_remat_size: over how many ranks weights are sharded that are gathered for each use (gtp_remat).
        expert_gtp_remat_size: the same of the experts' weights (egtp_remat).
        num_distributed_optimizer_instances: how many optimizer instances share the replicas.
        expert_tensor_parallel_size: how many ranks share each expert (etp); by default tp.
        nccl_communicator_config_path: a YAML file of NCCL settings by the names of groups.
        distributed_timeout_minutes: the timeout of the groups, in minutes.
        order: the parallelisms, the one whose ranks are adjacent first.
        get_embedding_ranks: which ranks of a pipeline hold word embeddings; by default the first and the last.
        get_position_embedding_ranks: which hold position embeddings; by default the first.
        create_gloo_process_groups: make a gloo group beside each data-parallel group.
        high_priority_stream_groups: names of groups, such as "dp_cp", whose NCCL streams go first.
        sharp_enabled_group: "dp" (the default with ``use_sharp``) or "dp_replica".
        rank_offset: the first rank; the ranks of the mesh are those from here.
        local_world_size: the number of ranks of the mesh; by default that of the world. A rank outside of the mesh
            need not call, and has no groups.
        create_all_gather_group: make a second communicator over dp and cp, for all-gathers.

    Raises:
        ContractError: what the original asserts: no default group, a second initialization, what does not divide.
        ContractRuntimeError: sizes that do not fit the world, or an order without a place for one of them.
        ContractKeyError: the order names something unknown.
        ContractFileNotFoundError: there is no file at the path.
        AgreementError: the other ranks did not call this, or not with the same arguments.

        After an error the state is as before, and no group is left over.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> from namedmesh.compat.megatron import current_mesh, parallel_state
        >>> _ = namedmesh.launch.init("cpu")
        >>> parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        >>> parallel_state.get_data_parallel_world_size(), current_mesh().layout
        (1, Layout(pp=1, dp=1, cp=1, tp=1))
        >>> parallel_state.destroy_model_parallel()
        >>> dist.destroy_process_group()
    """
    require_default_group()
    world, start, size = dist.get_world_size(), config.rank_offset, config.local_world_size
    ranks = range(world) if size is None else range(start, start + size)
    if dist.get_rank() not in ranks:
        config.validate(world)
        BINDING.assign({"_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer(default_group_device())})
        return
    defaults = GroupOptions(timeout=timedelta(minutes=config.distributed_timeout_minutes))
    with agreed(GroupPool(defaults=defaults), "megatron.initialize_model_parallel", ranks) as maker:
        dense, expert = config.validate(world)
        BINDING.refuse_second()
        factorings = Factorings(dense, expert)
        options, wanted = group_options(factorings, config)
        # NCCL lets one group use SHARP: the first that is created with this set.
        os.environ.pop("NCCL_COLLNET_ENABLE", None)
        if config.pipeline_model_parallel_comm_backend == "ucc":
            _prepare_ucc()
        fields = config.fields_to_compare(factorings)
        mesh = make_mesh(maker, dense, fields, options[DENSE], groups=wanted)
        view = mesh.create_view(expert, maker, options[EXPERT])
        mesh.take_view(EXPERT, view, options[EXPERT])
        groups = build_groups(mesh, maker, factorings, config)
    BINDING.take(mesh, bindable(config), groups, owned=True)


def destroy_model_parallel() -> None:
    """Forget every answer and assignment; the groups that ``initialize_model_parallel`` made are destroyed.

    A mesh that was bound with :func:`bind` stays, with its groups. Without a state nothing happens.
    """
    BINDING.destroy()


def _prepare_ucc() -> None:
    """Set the environment for the UCC backend as the original does: where the user has not, and in any case."""
    for name, value in (
        ("TORCH_UCC_BLOCKING_WAIT", "none"),
        ("UCC_EC_CUDA_STREAM_TASK_MODE", "driver"),
        ("UCX_TLS", "ib,cuda_copy"),
    ):
        os.environ.setdefault(name, value)
    os.environ |= {"NSYS_UCP_COMM_PARAMS": "1", "UCX_RNDV_THRESH": "0"}
    os.environ |= {"UCX_NET_DEVICES": "all", "UCC_CL_BASIC_TLS": "^sharp,nccl"}
