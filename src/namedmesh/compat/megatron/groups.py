"""Megatron's groups on a mesh: which there are, and the answers that follow from them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer
from namedmesh.compat.megatron.ranks import chunks, level_groups
from namedmesh.lazy_group import LazyGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from namedmesh.compat.megatron.shape import Shape
    from namedmesh.compat.megatron.wish import Wish
    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh
    from namedmesh.options import GroupOptions

__all__ = ["REGULAR", "Regular", "make_answers", "product_options", "wanted_groups"]


class Regular(NamedTuple):
    """A group over some axes: its slots in the state, Megatron's name for its options, and the axes."""

    group: str
    key: str
    axes: tuple[str, ...]
    ranks: str | None = None
    gloo: str | None = None


REGULAR = (
    Regular("dp_cp_group", "dp_cp", ("dp", "cp"), "dp_cp_ranks", "dp_cp_gloo"),
    Regular("dp_group", "dp", ("dp",), "dp_ranks", "dp_gloo"),
    Regular("cp_group", "cp", ("cp",), "cp_ranks"),
    Regular("mp_group", "mp", ("tp", "pp"), "mp_ranks"),
    Regular("tp_group", "tp", ("tp",), "tp_ranks"),
    Regular("pp_group", "pp", ("pp",), "pp_ranks"),
    Regular("tp_dp_cp_group", "tp_dp_cp", ("tp", "dp", "cp")),
    Regular("tp_dp_group", "tp_dp", ("tp", "dp")),
    Regular("tp_cp_group", "tp_cp", ("tp", "cp")),
    Regular("ep_group", "ep", ("ep",), "ep_ranks"),
    Regular("etp_group", "ep_tp", ("etp",)),
    Regular("etp_ep_group", "tp_ep_mp", ("etp", "ep")),
    Regular("etp_ep_pp_group", "tp_ep_pp", ("etp", "ep", "pp")),
    Regular("edp_group", "ep_dp", ("edp",), None, "edp_gloo"),
)
"""The groups over whole axes, in the order they are made."""


def product_options(shape: Shape, wish: Wish) -> dict[str, GroupOptions]:
    """The wished options of the groups over whole axes, by the names that a mesh knows them by.

    Megatron gives each group the options of its own name and no other; a mesh would let a group over two axes
    have those of both. So once anything is wished, every group is told.
    """
    from namedmesh.options import GroupOptions

    if not wish.options and wish.pp_backend is None:
        return {}
    options = {}
    for row in REGULAR:
        _, axes = shape.place(row.axes)
        said = wish.options.get(row.key, GroupOptions())
        if row.key == "pp" and wish.pp_backend is not None:
            # The original gives no NCCL settings to a backend that is not NCCL.
            said = GroupOptions(backend="ucc") if wish.pp_backend == "ucc" else replace(said, backend="nccl")
        options["_".join(axes)] = said
    return options


def wanted_groups(
    shape: Shape, options_of: Callable[[tuple[str, ...]], GroupOptions]
) -> list[tuple[Layout, tuple[str, ...], GroupOptions]]:
    """The layout, axes and options of every group over whole axes."""
    places = [shape.place(row.axes) for row in REGULAR]
    return [(layout, axes, options_of(axes)) for layout, axes in places]


def make_answers(mesh: NamedMesh, shape: Shape, wish: Wish) -> dict[str, Any]:
    """Make the groups that the mesh does not have yet, or reserve them; communicates.

    Every rank of the mesh calls this with the same arguments. Megatron has many groups that most jobs never
    use: a group that can be made without waiting for the other ranks is reserved, and created on first use.

    Returns:
        For this rank, the value of every slot of the state that a mesh determines, or a group to be created on first use.

    Raises:
        ContractError: a callback names ranks that are not in the pipeline it was given.
    """
    maker = _Maker(mesh, shape, wish)
    with _sharp(wish, "dp"):
        answers = maker.regular(REGULAR[:1]) | maker.optimizer_parts()
        _meet(mesh, answers["dp_cp_group"], wish, "dp")
    answers |= maker.regular(REGULAR[1:])
    answers |= maker.context_levels() | maker.hybrid()
    answers |= maker.embedding("embedding", "embd", wish.embedding_ranks)
    answers |= maker.embedding("position_embedding", "pos_embd", wish.position_embedding_ranks)
    with _sharp(wish, "dp_replica"):
        answers |= maker.expert_parts()
        _meet(mesh, answers["inter_edp_group"], wish, "dp_replica")
    answers |= maker.optimizer_instance()
    if wish.instances == 1:
        whole = ("dp_cp_group", "dp_cp_gloo", "edp_group", "edp_gloo")
        answers |= {f"intra_{slot}": answers[slot] for slot in whole}
    if wish.virtual_size is not None:
        answers |= {"vpp_rank": 0, "vpp_size": wish.virtual_size}
    answers["memory_buffer"] = GlobalMemoryBuffer(mesh.device)
    # None stands for the default group, as in the original's list.
    answers["group_list"] = [None, *(made.group for made in mesh.communicators if made.owned)]
    return answers


class _Maker:
    """Makes groups on one mesh; every method is called by every rank, in the same order."""

    def __init__(self, mesh: NamedMesh, shape: Shape, wish: Wish) -> None:
        self.mesh, self.shape, self.wish = mesh, shape, wish
        self.rank = mesh.global_rank

    def regular(self, rows: Sequence[Regular]) -> dict[str, Any]:
        """Groups over whole axes, with their ranks and gloo twins."""
        answers: dict[str, Any] = {}
        pool = self.mesh.pool
        for row in rows:
            layout, axes = self.shape.place(row.axes)
            options = self.mesh.options_of(axes)
            answers[row.group] = pool.reserve(layout, axes, options)
            if row.key == "dp_cp" and self.wish.gather_group:
                apart = replace(options, share=False)
                answers["dp_cp_gather_group"] = pool.make(layout, axes, apart)
            if row.ranks is not None:
                answers[row.ranks] = list(layout.group(self.rank, *axes))
            if row.gloo is not None:
                twin = pool.gloo_options(options)
                answers[row.gloo] = pool.reserve(layout, axes, twin) if self.wish.gloo else None
        return answers

    def optimizer_parts(self) -> dict[str, Any]:
        """The contiguous part of the data- and context-parallel group that one optimizer instance has."""
        if self.wish.instances == 1:
            return {}
        layout, axes = self.shape.place(("dp", "cp"))
        size = layout.size(*axes) // self.wish.instances
        sets = [part for ranks in layout.groups(*axes) for part in chunks(ranks, size)]
        return self._sets("intra_dp_cp_group", "intra_dp_cp", sets, axes, twin="intra_dp_cp_gloo")

    def context_levels(self) -> dict[str, Any]:
        """The groups of the levels of the context-parallel group, innermost first."""
        if not self.wish.levels:
            return {}
        layout, axes = self.shape.place(("cp",))
        levels = []
        for level in range(len(self.wish.levels)):
            sets = [
                part
                for ranks in layout.groups(*axes)
                for part in level_groups(ranks, self.wish.levels, level)
            ]
            levels.append(_now(self._sets("level", "hcp", sets, axes)["level"]))
        return {"cp_levels": levels}

    def hybrid(self) -> dict[str, Any]:
        """A group for each power of two from 2, as far as the original goes: below half of a group."""
        answers: dict[int, Any] = {}
        if self.wish.hybrid:
            layout, axes = self.shape.place(("dp", "cp"))
            for power in range(1, layout.size(*axes).bit_length() - 1):
                sets = [part for ranks in layout.groups(*axes) for part in chunks(ranks, 2**power)]
                answers[2**power] = _now(self._sets("group", "dp_cp", sets, axes)["group"])
        return {"hybrid_groups": answers}

    def embedding(self, slot: str, key: str, choose: Callable[[list[int]], list[int]]) -> dict[str, Any]:
        """The group of the stages that share an embedding; none on a rank of another stage."""
        layout, axes = self.shape.place(("pp",))
        chosen = [_checked(choose, list(ranks)) for ranks in layout.groups(*axes)]
        answers = self._sets(f"{slot}_group", key, chosen, axes)
        answers[f"{slot}_ranks"] = next((ranks for ranks in reversed(chosen) if self.rank in ranks), None)
        return answers

    def expert_parts(self) -> dict[str, Any]:
        """The part of the experts' data-parallel group inside one optimizer instance, and the one across."""
        if self.wish.instances == 1:
            return {"inter_edp_group": None}
        layout, axes = self.shape.place(("edp",))
        sizes = (layout.size(*axes) // self.wish.instances, self.wish.instances)
        inside, across = (
            [part for ranks in layout.groups(*axes) for part in level_groups(ranks, sizes, level)]
            for level in (0, 1)
        )
        return self._sets("intra_edp_group", "intra_ep_dp", inside, axes, twin="intra_edp_gloo") | self._sets(
            "inter_edp_group", "inter_ep_dp", across, axes
        )

    def optimizer_instance(self) -> dict[str, Any]:
        """Every rank of one optimizer instance: the model-parallel ranks of a part of the experts' replicas."""
        layout, axes = self.shape.place(("edp",))
        replicas = layout.size(*axes) // self.wish.instances
        models = layout.groups(*self.shape.place(("etp", "ep", "pp"))[1])
        sets = [
            [rank for model in models[i : i + replicas] for rank in model]
            for i in range(0, len(models), replicas)
        ]
        return self._sets("optimizer_group", "intra_dist_opt_instance", sets, ())

    def _sets(
        self,
        slot: str,
        key: str,
        sets: Sequence[Sequence[int]],
        axes: tuple[str, ...],
        *,
        twin: str | None = None,
    ) -> dict[str, Any]:
        """Groups over parts of what the axes span: with options of their own, or else those of the axes."""
        options = self.wish.options.get(key) or self.mesh.options_of(axes)
        pool = self.mesh.pool
        answers = {slot: pool.reserve_set(sets, key, options)}
        if twin is not None:
            gloo = pool.gloo_options(options)
            answers[twin] = pool.reserve_set(sets, key, gloo) if self.wish.gloo else None
        return answers


def _now(group: dist.ProcessGroup | LazyGroup | None) -> dist.ProcessGroup | None:
    """A group that is handed out in a container, which cannot wait until it is asked for."""
    return group.get_or_create() if isinstance(group, LazyGroup) else group


def _checked(choose: Callable[[list[int]], list[int]], pipeline: list[int]) -> list[int]:
    chosen = list(choose(list(pipeline)))
    strangers = [rank for rank in chosen if rank not in pipeline]
    if strangers or not chosen or len(set(chosen)) != len(chosen):
        raise ContractError(
            f"{getattr(choose, '__name__', choose)} chose {chosen} of the pipeline {pipeline}; "
            "it has to return one or more of these ranks, each once"
        )
    return chosen


@contextmanager
def _sharp(wish: Wish, group: str) -> Iterator[None]:
    """NCCL looks at the environment when a communicator comes about; the groups made inside get SHARP."""
    if wish.sharp != group:
        yield
        return
    os.environ["NCCL_COLLNET_ENABLE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("NCCL_COLLNET_ENABLE", None)


def _meet(mesh: NamedMesh, reserved: dist.ProcessGroup | LazyGroup | None, wish: Wish, name: str) -> None:
    """A first collective, so that the communicator comes about while the environment asks for SHARP."""
    if wish.sharp != name or reserved is None:
        return
    group = _now(reserved)
    if mesh.device.type == "cuda":
        dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
    else:
        dist.barrier(group=group)
