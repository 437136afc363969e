"""Ranks as Megatron asks for them, and what fills the variables of the stand-in for its parallel state: groups and a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist

from namedmesh._torch import from_all, set_group_timeout
from namedmesh.axes import DENSE_COUNTERPARTS
from namedmesh.compat import ContractError, ContractRuntimeError
from namedmesh.compat.state import mesh_axes
from namedmesh.layout import Layout
from namedmesh.legacy import DENSE, MEGATRON_GROUPS, GroupSpec, parse_order

WORDS = {**DENSE_COUNTERPARTS, "egtp_remat": "gtp_remat"}
"""Our words for the experts' axes, and Megatron's, which are those of the dense ones."""
EXPERT = {word: (own,) for own, word in WORDS.items()}

AxesOf: TypeAlias = "dict[tuple[int, ...], tuple[Layout, tuple[str, ...]]]"
"""Over which axes of which layout each set of ranks is."""


# Ranks.


class MeshRanks:
    """Takes the place of a ``RankGenerator``: the ranks are those of a layout, in whatever order its axes are.

    ``words`` are the axes for those of Megatron's words that are no axes of the layout. Over which axes each set of ranks is
    goes into ``axes_of``.
    """

    def __init__(
        self, layout: Layout, axes_of: AxesOf, words: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self.layout, self.axes_of, self.words = layout, axes_of, words or {}

    @classmethod
    def of(cls, generator: Any, axes_of: AxesOf, *, experts: bool) -> MeshRanks:
        """Return the ranks of a RankGenerator: over its axes that have a size, in its order, as we call them."""
        axes, words = {}, EXPERT if experts else {}
        for word, size in zip(generator.order.split("-"), generator.ordered_size, strict=True):
            if size > 1 or word in {"pp", "dp", "tp", "ep" if experts else "cp"}:
                axes[words.get(word, (word,))[0]] = size
        return cls(Layout.from_shape(list(axes)[::-1], list(axes.values())[::-1]), axes_of, words)

    def own(self, *words: str) -> tuple[str, ...]:
        """Return the axes of the layout, of several ranks, for some of Megatron's words."""
        own = mesh_axes(self.layout, [axis for word in words for axis in self.words.get(word, (word,))])
        return tuple(axis for axis in own if self.layout[axis] > 1)

    def size(self, word: str) -> int:
        """Return the number of ranks over one of Megatron's axes."""
        own = self.own(word)
        return self.layout.size(*own) if own else 1

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return every group over the axes that a token such as ``"tp-dp"`` names."""
        own = self.own(*token.split("-"))
        if not own:
            return [[rank] for rank in self.layout.ranks]
        groups = self.layout.groups(*own)
        for ranks in groups:
            self.axes_of.setdefault(ranks, (self.layout, own))
        return [list(ranks) for ranks in groups]

    def get_gtp_ranks(self, _size: int) -> list[list[int]]:
        """Return the groups over ``gtp_remat``."""
        return self.get_ranks("gtp_remat")


class RankGenerator(MeshRanks):
    """The groups of every kind of parallelism, as lists of ranks, from sizes and an order, neighbors first."""

    def __init__(  # noqa: PLR0917  the original's signature
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0
    ) -> None:
        if ep != 1 and cp != 1:
            raise ContractError(
                f"ep is {ep} and cp is {cp}: one generator has one of them; cp is for the dense ranks, ep for the experts'"
            )
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        parsed = parse_order(order.lower(), tuple(self.name_to_size))
        for name in parsed.omitted:
            # As the original, which looks for a part of the text.
            if name not in order.lower() and self.name_to_size[name] != 1:
                raise ContractRuntimeError(
                    f"the size of {name} is {self.name_to_size[name]}, but the order {order!r} has no place for it; add {name!r}"
                )
        self.order, self.rank_offset = "-".join(parsed.tokens), rank_offset
        self.ordered_size = [self.name_to_size[name] for name in parsed.tokens]
        layout = Layout.from_shape(parsed.tokens[::-1], self.ordered_size[::-1], rank_offset=rank_offset)
        super().__init__(layout, {})
        self.world_size = layout.world_size

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return for each name of an order whether a token such as ``"tp-pp"`` has it."""
        names = order.split("-")
        places = [names.index(name) for name in token.split("-")]
        return [place in places for place in range(len(names))]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return every group over the parallelisms that a token names, all of which are to be there."""
        self.get_mask(self.order, token)
        return super().get_ranks(token)


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the groups over the sizes that are masked, the first size being that of neighbors."""
    names = [f"axis{place}" for place in range(len(parallel_size))]
    layout = Layout.from_shape(names[::-1], list(parallel_size)[::-1])
    token = "-".join([name for name, inside in zip(names, mask, strict=True) if inside])
    groups = MeshRanks(layout, {}).get_ranks(token)
    count = world_size // len(groups[0])
    if count > len(groups):
        raise ContractError(
            f"the sizes {list(parallel_size)} multiply to less than the world of {world_size} ranks"
        )
    return groups[:count]


def split(sets: Sequence[Sequence[int]], size: int, stride: int = 1) -> list[list[int]]:
    """Split sets of ranks, taken together, into sets of some size, of every ``stride``-th rank each.

    Example:
        >>> split([range(8)], 2, 2)
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    ranks, span = list(chain(*sets)), size * stride
    return [ranks[i : i + span : stride] for i in range(len(ranks)) if i % span < stride]


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold word embeddings: the first and the last."""
    return [pp_ranks[0], pp_ranks[-1]] if len(pp_ranks) > 1 else [pp_ranks[0]]


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold position embeddings: the first."""
    return [pp_ranks[0]]


# Groups.


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Any]) -> None:
    """Return None for a group without NCCL settings; those of others are megatron-core's."""
    if nccl_comm_cfgs.get(pg_name):
        raise ContractError(
            f"the settings of {pg_name!r} are made by megatron-core only; install it, or bind a mesh with GroupOptions"
        )


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one setting of a group."""
    nccl_comm_cfgs.setdefault(pg_name, {})[key_value_pair[0]] = key_value_pair[1]


class Maker:
    """Makes groups, and fills the variables of a module with them, whose ``create_group`` and ``RankGenerator`` it calls."""

    def __init__(self, module: dict[str, Any]) -> None:
        self.module = module

    def create_group(  # noqa: PLR0917  the original's signature
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Any:
        """Create a group that belongs to the caller, as ``torch.distributed.new_group`` does; every rank calls."""
        members = None if ranks is None else list(ranks)
        group = dist.new_group(members, timeout, backend, pg_options, use_local_synchronization, group_desc)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            listed = self.module["_global_process_group_list"] or [None]  # the default group
            listed.append(group)
            self.module["_global_process_group_list"] = listed
        return group

    def _create(self, sets: Sequence[Sequence[int]], **options: Any) -> Any:
        """Create a group over each set of ranks, and return the one that this rank is in."""
        mine = None
        for ranks in sets:
            group = self.module["create_group"](ranks, **options)
            if dist.get_rank() in ranks:
                mine = group
        return mine

    def create_hierarchical_groups(  # noqa: PLR0917  the original's signature
        self,
        rank: int,
        ranks: Sequence[int],
        hierarchical_group_sizes: Sequence[int],
        create_gloo_process_groups: bool = False,
        pg_options: Any = None,
        timeout: timedelta | None = None,
        group_desc: str | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Create the groups at each level of a hierarchy over some ranks, and return this rank's, and those of gloo."""
        sizes = list(hierarchical_group_sizes)
        if prod(sizes) != len(ranks):
            raise ContractError(
                f"the hierarchical sizes {sizes} multiply to {prod(sizes)}, but the group has {len(ranks)} ranks; change a size"
            )
        options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
        groups, of_gloo = [], []
        for level, size in enumerate(sizes):
            sets = split([ranks], size, prod(sizes[:level]))
            name, second = f"HIERARCHICAL_{group_desc}_L{level}", None
            groups.append(self._create(sets, timeout=timeout, pg_options=options[level], group_desc=name))
            if create_gloo_process_groups:
                second = self._create(sets, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO")
            of_gloo.append(second)
        return (groups, of_gloo) if rank in ranks else ([], [])

    def create_hybrid_dp_cp_groups(self, rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
        """Create groups of neighboring ranks, for each power of two from 2 to below the number of ranks."""
        groups = {}
        for power in range(1, len(ranks).bit_length() - 1):
            name = f"HYBRID_DP_CP_GROUP_{2**power}"
            groups[2**power] = self._create(split([ranks], 2**power), pg_options=pg_options, group_desc=name)
        return groups if rank in ranks else {}

    def create_all_gather_groups(
        self,
        for_expert_parallelism: bool = False,
        timeout: timedelta | None = None,
        nccl_comm_cfgs: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        """Create second groups over the ranks of dp and cp, and of edp if asked, so that all-gathers overlap."""
        get_nccl_options("dp_cp", nccl_comm_cfgs or {})
        if self.module["_DATA_PARALLEL_GROUP"] is None:
            raise ContractRuntimeError(
                "there are no groups to double; call initialize_model_parallel(...) first"
            )
        variables = ["_DATA_PARALLEL_GROUP_WITH_CP"]
        if for_expert_parallelism and self.module["get_expert_model_parallel_world_size"]() > 1:
            variables.append("_EXPERT_DATA_PARALLEL_GROUP")
        made, world = [None, None], cast("dist.ProcessGroup", dist.group.WORLD)
        for place, variable in enumerate(variables):
            own = tuple(dist.get_process_group_ranks(self.module[variable]))
            sets = list(dict.fromkeys(from_all(world, own)))
            made[place] = self._create(sets, timeout=timeout, group_desc=f"{variable[1:]}_AG")
        return made[0], made[1]

    def update_pg_timeout(self, timeout: timedelta, pg: Any = None) -> None:
        """Change the timeout of a group, or of all groups and the default one, after their ranks have met."""
        dist.barrier(pg)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for group in self.module["_global_process_group_list"] if pg is None else [pg]:
            set_group_timeout(timeout, group)

    def initialize_model_parallel(  # noqa: C901, PLR0912, PLR0917  the original's signature, and its checks
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
        """Make the groups of a job of some sizes; every rank calls it with the same arguments, the original's."""
        settings = (
            nccl_communicator_config_path or high_priority_stream_groups or use_sharp or sharp_enabled_group
        )
        backend = pipeline_model_parallel_comm_backend not in {None, "nccl"}
        if settings or backend or max(gtp_remat_size, expert_gtp_remat_size) > 1:
            raise ContractError(
                "settings of NCCL and SHARP, backends of pipelines and weights gathered for each use (gtp_remat) are "
                "megatron-core's: let it be installed, and call namedmesh.compat.megatron.install(), or leave them out"
            )
        if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size == 1:
            raise ContractRuntimeError(
                "virtual stages interleave the stages of a pipeline; set pipeline_model_parallel_size to 2 or more"
            )
        tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
        ep, instances = expert_model_parallel_size, num_distributed_optimizer_instances
        etp = tp if expert_tensor_parallel_size is None else expert_tensor_parallel_size
        world = dist.get_world_size() if local_world_size is None else local_world_size
        dp, edp = _what_is_left(world, tp, pp, cp), _what_is_left(world, etp, ep, pp)
        dense = self.module["RankGenerator"](tp, 1, dp, pp, cp, order, rank_offset)
        expert = self.module["RankGenerator"](etp, ep, edp, pp, 1, order, rank_offset)
        unlike = not order.endswith("pp") and pp > 1 and dp != edp
        if unlike or dense.get_ranks("pp") != expert.get_ranks("pp"):
            raise ContractError(
                f"the pipelines of the layers and of their experts do not fit together in the order {order!r}; put pp last "
                "in it, or choose expert sizes that leave edp = dp"
            )
        for name, size in (("dp x cp", dp * cp), ("edp", edp)):
            if instances < 1 or size % instances:
                raise ContractError(
                    f"num_distributed_optimizer_instances is {instances}, which does not divide {name} = {size}; change it"
                )
        if hybrid_context_parallel and dp * cp % 2:
            raise ContractError(f"hybrid_context_parallel needs an even dp x cp, and it is {dp * cp}")
        timeout = timedelta(minutes=distributed_timeout_minutes)
        unwanted = {"several"}
        if instances == 1:
            unwanted.add("peers")
        if not create_all_gather_group:
            unwanted.add("second")
        choose = {
            "ends": get_embedding_ranks or default_embedding_ranks,
            "first": get_position_embedding_ranks or default_position_embedding_ranks,
        }
        for row in MEGATRON_GROUPS:
            if row.members in unwanted:
                continue
            sets = _sets(row, dense, expert, instances)
            if row.members in choose:
                sets = [[*choose[row.members](ranks)] for ranks in sets]
            self._make(row, sets, timeout, gloo=create_gloo_process_groups)
        rank, levels = dist.get_rank(), hierarchical_context_parallel_sizes
        for ranks in dense.get_ranks("cp") if levels else ():
            groups, _ = self.create_hierarchical_groups(
                rank, ranks, levels or (), timeout=timeout, group_desc="CONTEXT_PARALLEL_GROUP"
            )
            if groups:
                self.module["_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"] = groups
        for ranks in dense.get_ranks("dp-cp") if hybrid_context_parallel else ():
            self.module["_HYBRID_DP_CP_GROUPS"] |= self.create_hybrid_dp_cp_groups(rank, ranks, None)
        if virtual_pipeline_model_parallel_size is not None:
            self.module["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
            self.module["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = virtual_pipeline_model_parallel_size
        self.module["_set_global_memory_buffer"]()

    def _make(self, row: GroupSpec, sets: Sequence[Sequence[int]], timeout: timedelta, *, gloo: bool) -> None:
        """Make the groups of a row of the table, and assign this rank's to the variables of the row."""
        name = row.variable[1:]
        self.module[row.variable] = self._create(sets, timeout=timeout, group_desc=name)
        if row.ranks:
            mine = [list(ranks) for ranks in sets if dist.get_rank() in ranks]
            self.module[row.ranks] = mine[0] if mine else None
        if row.gloo and gloo:
            second = self._create(sets, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO")
            self.module[row.gloo] = second


def _sets(row: GroupSpec, dense: MeshRanks, expert: MeshRanks, instances: int) -> list[list[int]]:
    """Return the sets of ranks that have a group of a row of the table; of embeddings, whole pipelines."""
    token = "-".join([WORDS.get(axis, axis) for axis in row.axes])
    sets = (dense if row.view == DENSE else expert).get_ranks(token)
    each = len(sets[0]) // instances
    if row.variable == "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP":
        return split(expert.get_ranks("tp-ep-pp"), each)  # whole models
    if row.members == "instance":
        return split(sets, each)
    if row.members == "peers":
        return split(sets, instances, each)
    return sets


def _what_is_left(world: int, *sizes: int) -> int:
    if min(sizes) < 1 or world % prod(sizes):
        raise ContractRuntimeError(
            f"the sizes {' x '.join(map(str, sizes))} do not divide the world of {world} ranks; change a size"
        )
    return world // prod(sizes)


# What accessors answer with besides.


def missing(variable: str, check_initialized: bool = True) -> Any:
    """Raise the error of an accessor whose variable is empty; return None where it is not to check."""
    if not check_initialized:
        return None
    raise ContractError(
        f"the {variable.strip('_').replace('_', ' ').lower()} is not initialized; call "
        "initialize_model_parallel(...), with the option that makes this group, or "
        "namedmesh.compat.megatron.bind(mesh)"
    )


class GlobalMemoryBuffer:
    """Named buffers that grow to the largest size asked for; whoever shares a name must not use it at once."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of a shape, uninitialized, on the buffer of this name and type, on the current device."""
        length = prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < length:
            with (mem_alloc_context or nullcontext)():
                device = "cuda" if torch.cuda.is_available() else "cpu"
                held = self.buffer[name, dtype] = torch.empty(length, dtype=dtype, device=device)
        return held[:length].view(*tensor_shape)
