"""The experts' groups, and the groups of the instances of a distributed optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.megatron.state import STATE, late, missing, unknown_size, warn_deprecated

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "get_data_modulo_expert_parallel_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_gloo",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
]

_TWIN = "the gloo twin of the expert-data-parallel group"
_GLOO = "make the groups with create_gloo_process_groups=True"
_INSTANCES = "make the groups with num_distributed_optimizer_instances above 1"


def get_expert_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share out the experts: ``mesh.group("ep")``."""
    return STATE.ep_group or late(
        "ep_group", "the expert-parallel group", check_initialized=check_initialized
    )


def get_expert_model_parallel_src_rank() -> int:
    """The first global rank of the expert-parallel group."""
    try:
        return STATE.ep_ranks[0]
    except TypeError:  # None, for want of ranks
        raise missing("the expert-parallel group") from None


def get_expert_model_parallel_world_size() -> int:
    """Over how many ranks the experts are shared out; what was set wins; 0 without ``torch.distributed``."""
    size = STATE.ep_size
    return unknown_size("the expert-parallel group") if size is None else size


def get_expert_model_parallel_rank() -> int:
    """This rank's place among them; what was set wins; 0 without ``torch.distributed``."""
    rank = STATE.ep_rank
    return unknown_size("the expert-parallel group") if rank is None else rank


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Let the expert-parallel size be this, whatever the mesh says; None undoes it."""
    STATE.put("set_ep_size", world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Let the expert-parallel rank be this, whatever the mesh says; None undoes it."""
    STATE.put("set_ep_rank", rank)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each expert: ``mesh.group("etp")``."""
    return STATE.etp_group or late(
        "etp_group", "the expert-tensor-parallel group", check_initialized=check_initialized
    )


def get_expert_tensor_parallel_world_size() -> int | None:
    """How many ranks share each expert; what was set wins, for tp where there are no groups."""
    return STATE.etp_size


def get_expert_tensor_parallel_rank() -> int | None:
    """This rank's place among those that share each expert; what was set wins, for tp where there are no groups."""
    return STATE.etp_rank


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Let the experts' tensor-parallel size be this, whatever the mesh says; None undoes it."""
    STATE.put("set_etp_size", world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Let the experts' tensor-parallel rank be this, whatever the mesh says; None undoes it."""
    STATE.put("set_etp_rank", rank)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks of etp and ep together: one full set of a layer's experts."""
    return STATE.etp_ep_group or late(
        "etp_ep_group",
        "the expert-tensor- and expert-parallel group",
        check_initialized=check_initialized,
    )


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """The number of ranks of etp and ep together; 0 without ``torch.distributed``."""
    size = STATE.etp_ep_size
    return unknown_size("the expert-tensor- and expert-parallel group") if size is None else size


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place in etp and ep together; 0 without ``torch.distributed``."""
    rank = STATE.etp_ep_rank
    return unknown_size("the expert-tensor- and expert-parallel group") if rank is None else rank


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks of etp, ep and pp together: one full set of the model's experts."""
    return STATE.etp_ep_pp_group or late(
        "etp_ep_pp_group",
        "the expert-tensor-, expert- and pipeline-parallel group",
        check_initialized=check_initialized,
    )


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> dist.ProcessGroup:
    """The replicas of this rank's experts: ``mesh.group("edp")``, or the part in its optimizer instance."""
    return (STATE.intra_edp_group if partial_expert_data_parallel else STATE.edp_group) or late(
        "intra_edp_group" if partial_expert_data_parallel else "edp_group",
        "the expert-data-parallel group",
        check_initialized=check_initialized,
    )


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> dist.ProcessGroup:
    """The old name of :func:`get_expert_data_parallel_group`; deprecated."""
    warn_deprecated(
        "get_data_modulo_expert_parallel_group is deprecated; call get_expert_data_parallel_group instead"
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> dist.ProcessGroup:
    """The gloo twin of :func:`get_expert_data_parallel_group`."""
    if partial_expert_data_parallel:
        return STATE.intra_edp_gloo or late("intra_edp_gloo", _TWIN, _GLOO)
    return STATE.edp_gloo or late("edp_gloo", _TWIN, _GLOO)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """How many replicas of this rank's experts there are; 0 without ``torch.distributed``."""
    size = STATE.intra_edp_size if partial_expert_data_parallel else STATE.edp_size
    return unknown_size("the expert-data-parallel group") if size is None else size


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's place among the replicas of its experts; 0 without ``torch.distributed``."""
    rank = STATE.intra_edp_rank if partial_expert_data_parallel else STATE.edp_rank
    return unknown_size("the expert-data-parallel group") if rank is None else rank


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """Every rank of this rank's optimizer instance; the world, where there is one instance."""
    return STATE.optimizer_group or late(
        "optimizer_group", "the group of an optimizer instance", check_initialized=check_initialized
    )


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that hold the same part of the state in each optimizer instance."""
    return STATE.inter_edp_group or late(
        "inter_edp_group",
        "the group across optimizer instances",
        _INSTANCES,
        check_initialized=check_initialized,
    )
