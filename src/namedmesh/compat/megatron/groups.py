"""Make the groups of our fallback for ``megatron.core.parallel_state``.

The accessors, and the variables that they read, are in
:mod:`namedmesh.compat.megatron.parallel_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from inspect import signature
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from namedmesh.compat.errors import ContractError, ContractRuntimeError
from namedmesh.compat.megatron.ranks import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    split_ranks,
)
from namedmesh.compat.state import check_default_group, make_groups
from namedmesh.launch.default_group import default_group_device
from namedmesh.layout.axes import DENSE_COUNTERPARTS
from namedmesh.layout.orders import DENSE, MEGATRON_GROUPS, GroupSpec
from namedmesh.mesh.groups import set_timeout

__all__ = ["get_nccl_options", "overwrite_nccl_comm_cfgs"]

# Arguments that only megatron-core can use: NCCL settings, SHARP, and weights that are gathered for
# each use. Our fallback takes their defaults.
_NEED_MEGATRON_CORE: tuple[str, ...] = ("pipeline_model_parallel_comm_backend", "use_sharp", "gtp_remat_size")
_NEED_MEGATRON_CORE += ("expert_gtp_remat_size", "nccl_communicator_config_path")
_NEED_MEGATRON_CORE += ("high_priority_stream_groups", "sharp_enabled_group")


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Any]) -> None:
    """Return None, the options of a group; raise a ContractError if it has NCCL settings."""
    if nccl_comm_cfgs.get(pg_name):
        raise ContractError(f"the NCCL settings of {pg_name!r} need megatron-core; install it")


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one NCCL setting of a group, in place."""
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})[key] = value


class ParallelStateFallback:
    """Makes Megatron's groups and assigns them to the variables of a module.

    Args:
        module: the namespace of the module.
    """

    def __init__(self, module: dict[str, Any]) -> None:
        self.module = module

    def create_group(  # noqa: PLR0917  upstream's signature
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Any:
        """Create a group as ``torch.distributed.new_group`` does.

        Collective: every rank must call it.
        """
        members = None if ranks is None else list(ranks)
        group = dist.new_group(members, timeout, backend, pg_options, use_local_synchronization, group_desc)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            # Upstream lists the groups of this rank, after None, which is the default group there.
            listed = self.module["_global_process_group_list"] or [None]
            listed.append(group)
            self.module["_global_process_group_list"] = listed
        return group

    def _create_groups(self, rank_sets: Sequence[Sequence[int]], **options: Any) -> Any:
        """Create a group over each set of ranks; return this rank's (the last one), or None."""
        return make_groups(rank_sets, self.create_group, **options)

    def create_hierarchical_groups(  # noqa: PLR0917  upstream's signature
        self,
        rank: int,
        ranks: Sequence[int],
        hierarchical_group_sizes: Sequence[int],
        create_gloo_process_groups: bool = False,
        pg_options: Any = None,
        timeout: timedelta | None = None,
        group_desc: str | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Create the groups at each level of a hierarchy over the ranks of a group.

        Collective: every rank must call it.

        Args:
            rank: this rank.
            ranks: the ranks of the group.
            hierarchical_group_sizes: the size of the groups at each level, innermost first.
            create_gloo_process_groups: whether to create a gloo group in addition to each group.
            pg_options: the options of all groups, or a list with the options of each level.
            timeout: the timeout of the groups.
            group_desc: the part of the groups' descriptions that names the hierarchy.

        Returns:
            This rank's group and this rank's gloo group (or None) at each level; empty lists on
            other ranks.

        Raises:
            ContractError: the sizes do not multiply to the number of ranks.
        """
        sizes = list(hierarchical_group_sizes)
        if prod(sizes) != len(ranks):
            raise ContractError(
                f"the hierarchical sizes {sizes} multiply to {prod(sizes)}, but there are {len(ranks)} ranks"
            )
        options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
        groups = []
        gloo_groups = []
        for level, size in enumerate(sizes):
            # At each level, the distance between neighbors is the product of the inner sizes.
            sets = split_ranks([ranks], size, prod(sizes[:level]))
            name = f"HIERARCHICAL_{group_desc}_L{level}"
            arguments: dict[str, Any] = {"timeout": timeout, "group_desc": name}
            groups.append(self._create_groups(sets, pg_options=options[level], **arguments))
            # As upstream: the options are NCCL's, so gloo groups have none.
            gloo_sets = sets if create_gloo_process_groups else []
            gloo_groups.append(self._create_groups(gloo_sets, backend="gloo", **arguments))
        return (groups, gloo_groups) if rank in ranks else ([], [])

    def create_hybrid_dp_cp_groups(self, rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
        """Create groups of neighboring ranks, for each power of two below the number of ranks.

        Collective: every rank must call it.

        Returns:
            This rank's groups by their size; an empty dict on ranks that are not in ``ranks``.
        """
        groups = {}
        # The group of all ranks is not among them, as get_hybrid_data_context_parallel_groups
        # returns the data parallel group for its size.
        for power in range(1, len(ranks).bit_length() - 1):
            sets = split_ranks([ranks], 2**power)
            groups[2**power] = self._create_groups(sets, pg_options=pg_options)
        return groups if rank in ranks else {}

    def create_all_gather_groups(
        self,
        for_expert_parallelism: bool = False,
        timeout: timedelta | None = None,
        nccl_comm_cfgs: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        """Create duplicates of the dp-cp and edp groups, so that collectives can overlap.

        All-gathers use the duplicate while reduce-scatters use the group.
        Collective: every rank must call it.

        Args:
            for_expert_parallelism: whether to duplicate the edp group, if there are several ranks
                along ep.
            timeout: the timeout of the groups.
            nccl_comm_cfgs: the NCCL settings by group, which must be empty for these groups.

        Returns:
            This rank's duplicate of the dp-cp group, and of the edp group or None.

        Raises:
            ContractRuntimeError: Megatron is not initialized.
        """
        get_nccl_options("dp_cp", nccl_comm_cfgs or {})
        if self.module["_DATA_PARALLEL_GROUP"] is None:
            raise ContractRuntimeError(
                "there are no groups to duplicate; call initialize_model_parallel(...)"
            )
        variables = ["_DATA_PARALLEL_GROUP_WITH_CP"]
        if for_expert_parallelism and self.module["get_expert_model_parallel_world_size"]() > 1:
            variables.append("_EXPERT_DATA_PARALLEL_GROUP")
        duplicates: list[Any] = [None, None]
        for position, variable in enumerate(variables):
            # A rank uses its own group only, but torch requires it to create every group.
            ranks = dist.get_process_group_ranks(self.module[variable])
            # torch's all_gather_object needs NumPy, and all sets have the same size.
            local_ranks = torch.tensor(ranks, device=default_group_device())
            gathered = [torch.empty_like(local_ranks) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, local_ranks)
            sets = {tuple(members.tolist()) for members in gathered}
            name = f"{variable[1:]}_AG"
            duplicates[position] = self._create_groups(sorted(sets), timeout=timeout, group_desc=name)
        return duplicates[0], duplicates[1]

    def update_pg_timeout(self, timeout: timedelta, pg: Any = None) -> None:
        """Change the timeout of a group, or of all groups and the default one.

        Collective: every rank of the group, or every rank, must call it.
        """
        # As upstream: a pending collective must end before its group gets another timeout.
        dist.barrier(pg)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for group in self.module["_global_process_group_list"] if pg is None else [pg]:
            set_timeout(group, timeout)

    def initialize_model_parallel(  # noqa: C901, PLR0912, PLR0915, PLR0917  upstream's signature and checks
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        pipeline_model_parallel_comm_backend: str | None = None,
        use_sharp: bool = False,
        context_parallel_size: int = 1,
        hierarchical_context_parallel_sizes: Sequence[int] | None = None,
        *,
        hybrid_context_parallel: bool = False,
        expert_model_parallel_size: int = 1,
        gtp_remat_size: int = 1,
        expert_gtp_remat_size: int = 1,
        num_distributed_optimizer_instances: int = 1,
        expert_tensor_parallel_size: int | None = None,
        nccl_communicator_config_path: str | None = None,
        distributed_timeout_minutes: int = 30,
        order: str = "tp-cp-ep-dp-pp",
        get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
        get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
        create_gloo_process_groups: bool = True,
        high_priority_stream_groups: Sequence[str] | None = None,
        sharp_enabled_group: str | None = None,
        rank_offset: int = 0,
        local_world_size: int | None = None,
        create_all_gather_group: bool | None = False,
    ) -> None:
        """Make Megatron's groups for some sizes. The arguments are megatron-core's.

        Collective: every rank must call it with the same arguments.

        Raises:
            ContractError: as upstream's assertions, and for options that are not supported without
                megatron-core.
            ContractRuntimeError: the sizes do not divide the world size, or virtual stages without
                a pipeline.
        """
        arguments = locals()
        parameters = signature(self.initialize_model_parallel).parameters
        unsupported = []
        for name in _NEED_MEGATRON_CORE:
            if arguments[name] not in {parameters[name].default, "nccl"}:
                unsupported.append(name)
        if unsupported:
            raise ContractError(
                f"{', '.join(unsupported)} cannot be used without megatron-core; install it and "
                "call namedmesh.compat.megatron.install(), or omit these arguments"
            )
        check_default_group()
        pp = pipeline_model_parallel_size
        if virtual_pipeline_model_parallel_size is not None and pp == 1:
            raise ContractRuntimeError(
                "virtual_pipeline_model_parallel_size needs a pipeline; set "
                "pipeline_model_parallel_size to 2 or more"
            )
        tp = tensor_model_parallel_size
        cp = context_parallel_size
        ep = expert_model_parallel_size
        etp = tp if expert_tensor_parallel_size is None else expert_tensor_parallel_size
        instances = num_distributed_optimizer_instances
        world_size = dist.get_world_size() if local_world_size is None else local_world_size
        dp = _divide_world_size(world_size, tp, pp, cp)
        edp = _divide_world_size(world_size, etp, ep, pp)
        dense = RankGenerator(tp, 1, dp, pp, cp, order, rank_offset)
        # The expert layout has ep, and no cp: its axes edp, ep and etp cover the ranks along cp.
        expert = RankGenerator(etp, ep, edp, pp, 1, order, rank_offset)
        # Upstream asserts equal sizes for an order that does not end with pp, and then equal ranks.
        differ_in_size = not order.endswith("pp") and pp > 1 and dp != edp
        if differ_in_size or dense.get_ranks("pp") != expert.get_ranks("pp"):
            raise ContractError(
                "the pipelines of the dense layers and of the experts differ in the order "
                f"{order!r}; put pp last"
            )
        if self.module["_DATA_PARALLEL_GROUP"] is not None:
            raise ContractError(
                "Megatron's parallel state is already initialized; call destroy_model_parallel() "
                "first, or bind another mesh in addition with bind(mesh)"
            )
        # An optimizer instance is a slice of the data parallel ranks, of the experts' ones too.
        if instances < 1 or dp * cp % instances or edp % instances:
            raise ContractError(
                f"num_distributed_optimizer_instances is {instances}, which does not divide dp x "
                f"cp = {dp * cp} and edp = {edp}; change it"
            )
        if hybrid_context_parallel and dp * cp % 2:
            raise ContractError(f"hybrid_context_parallel needs an even dp x cp, got {dp * cp}")
        timeout = timedelta(minutes=distributed_timeout_minutes)
        omitted = {"several"}  # they are made below
        if instances == 1:
            omitted.add("peers")
        if not create_all_gather_group:
            omitted.add("second")
        choose_ranks = {
            "ends": get_embedding_ranks or default_embedding_ranks,
            "first": get_position_embedding_ranks or default_position_embedding_ranks,
        }
        rank = dist.get_rank()
        for row in MEGATRON_GROUPS:
            if row.members not in omitted:
                sets = _list_rank_sets(row, dense, expert, instances)
                # Embeddings are on some stages of each pipeline, which the caller may choose.
                if row.members in choose_ranks:
                    sets = [list(choose_ranks[row.members](pipeline)) for pipeline in sets]
                name = row.variable[1:]
                self.module[row.variable] = self._create_groups(sets, timeout=timeout, group_desc=name)
                if row.ranks:
                    own = [list(ranks) for ranks in sets if rank in ranks]
                    self.module[row.ranks] = own[0] if own else None
                if row.gloo and create_gloo_process_groups:
                    self.module[row.gloo] = self._create_groups(
                        sets, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO"
                    )
        for ranks in dense.get_ranks("cp") if hierarchical_context_parallel_sizes else []:
            sizes = hierarchical_context_parallel_sizes or ()
            name = "CONTEXT_PARALLEL_GROUP"
            groups, _ = self.create_hierarchical_groups(rank, ranks, sizes, timeout=timeout, group_desc=name)
            if groups:
                self.module["_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"] = groups
        for ranks in dense.get_ranks("dp-cp") if hybrid_context_parallel else []:
            self.module["_HYBRID_DP_CP_GROUPS"].update(self.create_hybrid_dp_cp_groups(rank, ranks, None))
        if virtual_pipeline_model_parallel_size is not None:
            self.module["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
            self.module["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = virtual_pipeline_model_parallel_size
        # Layers of Megatron that do sequence parallelism expect the buffer.
        self.module["_set_global_memory_buffer"]()


def _list_rank_sets(
    row: GroupSpec, dense: RankGenerator, expert: RankGenerator, instances: int
) -> list[list[int]]:
    """Return the ranks of every group of a row; for embeddings, of every pipeline."""
    # The experts' axes share their names with the dense axes in Megatron.
    token = "-".join([DENSE_COUNTERPARTS.get(axis, axis) for axis in row.axes])
    rank_sets = (dense if row.view == DENSE else expert).get_ranks(token)
    instance_size = len(rank_sets[0]) // instances
    if row.variable == "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP":
        # An instance holds full replicas of the model, which must not be split.
        return split_ranks(expert.get_ranks("tp-ep-pp"), instance_size)
    # Consecutive ranks of a group form an instance, so the distance between counterparts is the size
    # of an instance.
    if row.members == "instance":
        return split_ranks(rank_sets, instance_size)
    if row.members == "peers":
        return split_ranks(rank_sets, instances, instance_size)
    return rank_sets


def _divide_world_size(world_size: int, *sizes: int) -> int:
    """Divide the world size by the sizes; raise ContractRuntimeError if a rest remains."""
    if min(sizes) < 1 or world_size % prod(sizes):
        product = " x ".join(map(str, sizes))
        raise ContractRuntimeError(
            f"the sizes {product} do not divide the world size {world_size}; change a size"
        )
    return world_size // prod(sizes)


class GlobalMemoryBuffer:
    """Named buffers that grow to the largest requested size.

    Tensors with one name share memory, so they must not be in use at the same time.
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return an uninitialized tensor in the buffer of this name and dtype.

        Args:
            tensor_shape: the shape of the tensor.
            dtype: the dtype of the tensor.
            name: the name of the buffer.
            mem_alloc_context: makes the context in which the buffer is allocated, if it has to
                grow.
        """
        length = prod(tensor_shape)
        buffer = self.buffer.get((name, dtype))
        if buffer is None or buffer.numel() < length:
            # Upstream allocates on the current CUDA device only.
            device = "cuda" if torch.cuda.is_available() else "cpu"
            with (mem_alloc_context or nullcontext)():
                buffer = torch.empty(length, dtype=dtype, device=device)
            self.buffer[name, dtype] = buffer
        return buffer[:length].view(*tensor_shape)
