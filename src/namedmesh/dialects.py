"""The rank tables of the dialects: which axes each API has, in which order, and which groups it makes of them.

Pure data and arithmetic on :class:`namedmesh.Layout`; the planner and the dialects themselves read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from namedmesh.errors import AxisError, LayoutError, did_you_mean, listing
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AXES",
    "DENSE",
    "DIALECTS",
    "EXPERT",
    "EXPERT_AXES",
    "PLAIN",
    "Arrangement",
    "Dialect",
    "Kind",
    "arrange",
    "kinds_of",
    "nearest",
]

DENSE, EXPERT = "dense", "expert"
AXES = ("pp", "dp_replicate", "dp_shard", "dp", "cp", "tp")
"""The usual axes of the dense layout, slowest first."""
EXPERT_AXES = ("edp", "ep", "etp")
"""The axes that only the experts' layout has, slowest first."""
_DATA = ("dp_replicate", "dp_shard", "dp")


@dataclass(frozen=True)
class Kind:
    """One kind of process group.

    Args:
        name: what the dialect calls it.
        axes: the axes that vary inside a group.
        view: the layout that has these axes, ``"dense"`` or ``"expert"``.
        members: all ranks of the group, the two ends of it (one rank, if it has one only), or the first.
        twins: how many gloo groups the dialect makes beside each.
    """

    name: str
    axes: tuple[str, ...]
    view: str = DENSE
    members: Literal["all", "ends", "first"] = "all"
    twins: int = 0


@dataclass(frozen=True)
class Dialect:
    """How one API lays out ranks.

    Args:
        name: its name.
        axes: the axes of its dense layout, slowest first.
        expert: the axes of its experts' layout, slowest first; none if it has no such layout.
        words: its own name of an axis, where that is another.
        inferred: the axis that is whatever is left when it has no size.
        cuts: the axes over which one copy of the parameters is cut.
        kinds: the groups that it makes; by default one kind for each axis.
        orderable: whether the user may give another order of the axes.
        etp_follows_tp: whether the experts are tensor-parallel as the rest unless told otherwise.
        shrinks_tp: whether a tp larger than the world is cut down to it.
    """

    name: str
    axes: tuple[str, ...]
    expert: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    inferred: str = "dp"
    cuts: tuple[str, ...] = ("pp", "dp_shard", "tp")
    kinds: tuple[Kind, ...] = ()
    orderable: bool = False
    etp_follows_tp: bool = True
    shrinks_tp: bool = False

    @property
    def order(self) -> str:
        """The order string, fastest axis first.

        Example:
            >>> DIALECTS["megatron"].order, DIALECTS["deepspeed"].order
            ('tp-cp-ep-dp-pp', 'tp-dp-pp')
        """
        tokens = list(reversed(self.axes))
        if "ep" in self.expert:
            tokens.insert(min(tokens.index(axis) for axis in _DATA if axis in tokens), "ep")
        return "-".join(tokens)


_MEGATRON_KINDS = (
    Kind("data_parallel with_context_parallel", ("dp", "cp"), twins=1),
    Kind("data_parallel", ("dp",), twins=1),
    Kind("context_parallel", ("cp",)),
    Kind("model_parallel", ("pp", "tp")),
    Kind("tensor_model_parallel", ("tp",)),
    Kind("pipeline_model_parallel", ("pp",)),
    Kind("embedding", ("pp",), members="ends"),
    Kind("position_embedding", ("pp",), members="first"),
    Kind("tensor_and_data_parallel with_context_parallel", ("dp", "cp", "tp")),
    Kind("tensor_and_data_parallel", ("dp", "tp")),
    Kind("tensor_and_context_parallel", ("cp", "tp")),
    Kind("expert_model_parallel", ("ep",), EXPERT),
    Kind("expert_tensor_parallel", ("etp",), EXPERT),
    Kind("expert_tensor_and_model_parallel", ("ep", "etp"), EXPERT),
    Kind("expert_tensor_model_pipeline_parallel", ("pp", "ep", "etp"), EXPERT),
    Kind("expert_data_parallel", ("edp",), EXPERT, twins=1),
    Kind("intra_distributed_optimizer_instance", ("pp", "edp", "ep", "etp"), EXPERT),
)
_DEEPSPEED_KINDS = (
    Kind("ds_model", ("pp", "tp")),
    Kind("data", ("dp",)),
    Kind("pipe", ("pp",)),
    Kind("slice", ("tp",)),
)
_FAIRSCALE_KINDS = (Kind("data", ("dp",)), Kind("pipeline", ("pp",)), Kind("model", ("tp",)))
_EZPZ_KINDS = (
    Kind("data", ("dp",)),
    Kind("pipeline", ("pp",)),
    Kind("context", ("cp",)),
    Kind("tensor", ("tp",)),
)
_TORCHTITAN_KINDS = (
    *(Kind(axis, (axis,)) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
    Kind("batch", ("dp_replicate", "dp_shard")),
    Kind("fsdp", ("dp_shard", "cp")),
    Kind("loss", ("dp_replicate", "dp_shard", "cp")),
    *(Kind(axis, (axis,), EXPERT) for axis in EXPERT_AXES),
)
_LAB = ("dp", "pp", "tp")

PLAIN = Dialect("mesh", AXES, ("pp", *EXPERT_AXES), orderable=True)
"""A mesh of namedmesh with the usual names: only the axes that are named exist."""

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "megatron",
            ("pp", "dp", "cp", "tp"),
            ("pp", *EXPERT_AXES),
            kinds=_MEGATRON_KINDS,
            orderable=True,
        ),
        Dialect(
            "deepspeed",
            ("pp", "dp", "tp"),
            words={"pp": "pipe", "dp": "data", "tp": "model"},
            kinds=_DEEPSPEED_KINDS,
        ),
        Dialect("fairscale", ("dp", "pp", "cp", "tp"), kinds=_FAIRSCALE_KINDS, shrinks_tp=True),
        Dialect("ezpz", ("dp", "pp", "cp", "tp"), kinds=_EZPZ_KINDS, shrinks_tp=True),
        Dialect(
            "torchtitan",
            ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
            ("pp", "dp_replicate", *EXPERT_AXES),
            inferred="dp_shard",
            cuts=("pp", "dp_shard", "cp", "tp"),
            kinds=_TORCHTITAN_KINDS,
            etp_follows_tp=False,
        ),
        Dialect("process_groups", _LAB, kinds=tuple(Kind(axis, (axis,)) for axis in _LAB)),
    )
}
"""The dialects by name. Ranks are row-major in the axes of each, the last one fastest."""


@dataclass(frozen=True)
class Arrangement:
    """The ranks of a job: one layout, or two over the same ranks.

    Args:
        dialect: whose rank table it is.
        dense: the layout of everything but the experts.
        expert: the layout of the experts, if they have one of their own.
        notes: what the dialect changed about the sizes that were asked for.
    """

    dialect: Dialect
    dense: Layout
    expert: Layout | None = None
    notes: tuple[str, ...] = ()

    def layout(self, view: str) -> Layout:
        """The layout of a view.

        Raises:
            LayoutError: there is no such view.
        """
        if view == EXPERT and self.expert is not None:
            return self.expert
        if view != DENSE:
            raise LayoutError(f"view {view!r} is not there; give a size for ep, edp or etp")
        return self.dense


def arrange(
    dialect: Dialect,
    sizes: Mapping[str, int],
    *,
    world_size: int | None = None,
    order: str | None = None,
) -> Arrangement:
    """The layouts of a dialect for some sizes.

    Args:
        dialect: one of :data:`DIALECTS`, or :data:`PLAIN`.
        sizes: a size for each axis that matters; an axis without one is 1, the inferred one whatever is left.
        world_size: how many ranks there are; by default as many as the sizes need.
        order: another order, fastest axis first, with ``ep`` where the experts' axis goes; ``etp`` and ``edp``
            take the places of ``tp`` and ``dp``.

    Raises:
        AxisError: an axis that the dialect does not have, or that the order does not name.
        LayoutError: sizes that do not fit, or an order under which the experts' pipelines are other ranks.

    Example:
        >>> made = arrange(DIALECTS["megatron"], {"tp": 2, "pp": 4, "ep": 2}, world_size=16)
        >>> made.dense, made.expert
        (Layout(pp=4, dp=2, cp=1, tp=2), Layout(pp=4, edp=1, ep=2, etp=2))
    """
    _check_axes(dialect, sizes)
    sizes, notes = _shrunk(dialect, sizes, world_size)
    tokens = _tokens(dialect, sizes, order)
    dense_axes = [token for token in reversed(tokens) if token not in EXPERT_AXES]
    inferred = _inferred(dialect, sizes, dense_axes, world_size)
    wanted = [
        axis for axis in dense_axes if dialect is not PLAIN or sizes.get(axis) is not None or axis == inferred
    ]
    filled = [sizes.get(axis, -1 if axis == inferred else 1) for axis in wanted]
    dense = Layout.from_shape(wanted, filled, world_size=world_size)
    expert = _expert(dialect, sizes, tokens, dense)
    return Arrangement(dialect, dense, expert, notes)


def kinds_of(arrangement: Arrangement) -> tuple[Kind, ...]:
    """The groups that a dialect makes; for a plain mesh one kind for each axis, and the usual products.

    Example:
        >>> [kind.name for kind in kinds_of(arrange(PLAIN, {"pp": 2, "tp": 2}, world_size=8))]
        ['pp', 'dp', 'tp', 'model']
    """
    dense, expert = arrangement.dense, arrangement.expert
    if arrangement.dialect.kinds:
        kinds = [kind for kind in arrangement.dialect.kinds if kind.view == DENSE or expert is not None]
        if arrangement.dialect.name == "fairscale" and dense["cp"] > 1:
            kinds.append(Kind("context", ("cp",)))
        return tuple(kinds)
    kinds = [Kind(axis, (axis,)) for axis in dense]
    if expert is not None:
        kinds += [Kind(axis, (axis,), EXPERT) for axis in expert if axis not in dense]
    data = tuple(axis for axis in (*_DATA, "cp") if axis in dense)
    if len(data) > 1:
        kinds.append(Kind("batch and context" if "cp" in data else "batch", data))
    if "pp" in dense and "tp" in dense:
        kinds.append(Kind("model", ("pp", "tp")))
    return tuple(kinds)


def nearest(axis: str, allowed: Sequence[str]) -> str:
    """As :func:`namedmesh.errors.did_you_mean`, but silent about a usual name, which is no slip of the pen.

    Example:
        >>> nearest("tq", ("pp", "tp")), nearest("ep", ("pp", "tp"))
        ("; did you mean 'tp'?", '')
    """
    return "" if axis in {*AXES, *EXPERT_AXES} else did_you_mean(axis, allowed)


def _check_axes(dialect: Dialect, sizes: Mapping[str, int]) -> None:
    allowed = tuple(dict.fromkeys((*dialect.axes, *dialect.expert)))
    unknown = [axis for axis in sizes if axis not in allowed]
    if unknown:
        raise AxisError(
            *(
                f"axis {axis!r} is not one of {dialect.name}'s {allowed}{nearest(axis, allowed)}"
                for axis in unknown
            )
        )
    split = [axis for axis in ("dp_replicate", "dp_shard") if axis in sizes]
    if "dp" in sizes and split:
        raise AxisError(f"both 'dp' and {' and '.join(map(repr, split))} have a size; use one or the other")


def _shrunk(
    dialect: Dialect, sizes: Mapping[str, int], world_size: int | None
) -> tuple[Mapping[str, int], tuple[str, ...]]:
    tp = sizes.get("tp", 1)
    if not dialect.shrinks_tp or world_size is None or tp <= world_size:
        return sizes, ()
    note = f"{dialect.name} cuts tp={tp} down to the world of {world_size} ranks without an error"
    return {**sizes, "tp": world_size}, (note,)


def _inferred(
    dialect: Dialect, sizes: Mapping[str, int], axes: Sequence[str], world_size: int | None
) -> str | None:
    """The axis that takes what is left, unless a size says so itself or nothing is left to take."""
    if world_size is None or any(size == -1 for axis, size in sizes.items() if axis in axes):
        return None
    candidate = dialect.inferred
    if dialect is PLAIN and "dp" not in sizes and ("dp_replicate" in sizes or "dp_shard" in sizes):
        candidate = "dp_replicate" if "dp_shard" in sizes else "dp_shard"
    return candidate if candidate not in sizes and candidate in axes else None


def _tokens(dialect: Dialect, sizes: Mapping[str, int], order: str | None) -> list[str]:
    """The axes, fastest first; those that the order leaves out, of size 1, are the slowest."""
    default = dialect.order.split("-")
    if order is None:
        return default
    if not dialect.orderable:
        raise LayoutError(
            f"{dialect.name} has one order, {dialect.order!r}, not {order!r}; leave the order out, or the dialect"
        )
    tokens = order.split("-")
    unknown = [token for token in tokens if token not in default]
    problems = [
        f"{token!r} in the order {order!r} is not one of {listing(default)}{did_you_mean(token, default)}"
        for token in unknown
    ]
    problems += [f"{token!r} is twice in the order {order!r}" for token in default if tokens.count(token) > 1]
    homeless = [axis for axis, size in sizes.items() if size != 1 and axis in default and axis not in tokens]
    problems += [
        f"axis {axis!r} has size {sizes[axis]} but no place in the order {order!r}; add it"
        for axis in homeless
    ]
    if problems:
        raise AxisError(*problems)
    return tokens + [token for token in default if token not in tokens]


def _expert(
    dialect: Dialect, sizes: Mapping[str, int], tokens: Sequence[str], dense: Layout
) -> Layout | None:
    asked = any(axis in sizes for axis in EXPERT_AXES)
    if not dialect.expert or not (asked or dialect.name == "megatron"):
        return None
    names = {"tp": "etp", "ep": "ep", "pp": "pp"}
    kept = "dp_replicate" if "dp_replicate" in dialect.expert else None
    if kept is not None:
        names[kept] = kept
    names |= {axis: "edp" for axis in _DATA if axis != kept and axis in tokens}
    axes = list(dict.fromkeys(names[token] for token in reversed(tokens) if token in names))
    etp = dense["tp"] if dialect.etp_follows_tp and "tp" in dense else 1
    known = {"etp": etp, "edp": 1 if -1 in _own(sizes) else -1, **sizes}
    known |= {axis: dense[axis] for axis in axes if axis in dense}
    expert = Layout.from_shape(axes, [known.get(axis, 1) for axis in axes], world_size=dense.world_size)
    if "pp" in dense and dense.partition("pp") != expert.partition("pp"):
        raise LayoutError(
            f"the pipelines of {dense} and of the experts' {expert} are not the same ranks; put pp first or last in the "
            f"order {'-'.join(tokens)!r}"
        )
    return expert


def _own(sizes: Mapping[str, int]) -> list[int]:
    """The sizes of the axes that only the experts have."""
    return [sizes[axis] for axis in EXPERT_AXES if axis in sizes]
