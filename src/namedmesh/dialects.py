"""The rank tables of the dialects: which axes each API has, in which order, and which groups it makes of them.

Pure data and arithmetic on :class:`namedmesh.Layout`. The planner, the migration page and the dialects read these
tables: :data:`MEGATRON_GROUPS` has one row for each group of Megatron, and order strings are parsed by
:func:`parse_order` only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from namedmesh.errors import AxisError, LayoutError, did_you_mean, listing
from namedmesh.layout import Layout
from namedmesh.sizes import nearest_axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AXES",
    "DENSE",
    "DIALECTS",
    "EXPERT",
    "EXPERT_AXES",
    "MEGATRON_GROUPS",
    "PLAIN",
    "Dialect",
    "DialectLayout",
    "GroupSpec",
    "Order",
    "groups_of",
    "layouts_for",
    "parse_order",
]

DENSE, EXPERT = "dense", "expert"
AXES = ("pp", "dp_replicate", "dp_shard", "dp", "cp", "tp")
"""The usual axes of the dense layout, slowest first."""
EXPERT_AXES = ("edp", "ep", "etp")
"""The axes that only the experts' layout has, slowest first."""
_DATA = ("dp_replicate", "dp_shard", "dp")

Members = Literal["all", "ends", "first", "part"]


@dataclass(frozen=True)
class GroupSpec:
    """One kind of process group: a row of a dialect's table.

    Args:
        name: what the dialect calls it: the accessor without ``get_`` and ``_group``, and the flags that it takes.
        axes: the axes that vary inside a group.
        view: the layout that has these axes, ``"dense"`` or ``"expert"``.
        members: all ranks over the axes, the two ends (one rank, if there is one only), the first, or a part of
            them that does not follow from whole axes.
        variable: the module-level variable of the original that holds the group.
        ranks: the variable that holds its ranks.
        gloo: the variable that holds the gloo group over the same ranks.
    """

    name: str
    axes: tuple[str, ...]
    view: str = DENSE
    members: Members = "all"
    variable: str = ""
    ranks: str = ""
    gloo: str = ""

    @property
    def gloo_groups(self) -> int:
        """The number of gloo groups that the dialect makes beside each group."""
        return int(bool(self.gloo))


@dataclass(frozen=True)
class Dialect:
    """How one API lays out ranks.

    Args:
        name: its name.
        axes: the axes of its dense layout, slowest first.
        expert: the axes of its experts' layout, slowest first; none if it has no such layout.
        words: its own name of an axis, where that is another.
        inferred: the axis that is whatever is left when it has no size.
        shards: the axes over which one copy of the parameters is sharded.
        kinds: the groups that it makes; by default one kind for each axis.
        orderable: whether the user may give another order of the axes.
        etp_follows_tp: whether the experts are tensor-parallel as the rest unless an option says otherwise.
        shrinks_tp: whether a tp larger than the world is cut down to it.
    """

    name: str
    axes: tuple[str, ...]
    expert: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    inferred: str = "dp"
    shards: tuple[str, ...] = ("pp", "dp_shard", "tp")
    kinds: tuple[GroupSpec, ...] = ()
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


def _row(
    name: str, axes: str, variable: str, ranks: str = "", *, gloo: bool = False, members: Members = "all"
) -> GroupSpec:
    view = EXPERT if axes.rsplit(maxsplit=1)[-1] in {*EXPERT_AXES, "egtp_remat"} else DENSE
    twin = f"{variable}_GLOO" if gloo else ""
    return GroupSpec(name, tuple(axes.split()), view, members, variable, ranks, twin)


# fmt: off
MEGATRON_GROUPS = (
    _row("data_parallel with_context_parallel", "dp cp",
         "_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", gloo=True),
    _row("data_parallel", "dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS", gloo=True),
    _row("context_parallel", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    _row("model_parallel", "pp gtp_remat tp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    _row("tensor_model_parallel", "tp",
         "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    _row("pipeline_model_parallel", "pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    _row("embedding", "pp", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS", members="ends"),
    _row("position_embedding", "pp",
         "_POSITION_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GLOBAL_RANKS", members="first"),
    _row("tensor_and_data_parallel with_context_parallel", "dp cp gtp_remat tp",
         "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    _row("tensor_and_data_parallel", "dp gtp_remat tp", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    _row("tensor_and_context_parallel", "cp tp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    _row("gtp_weight_remat", "gtp_remat", "_GTP_WEIGHT_REMAT_GROUP", "_GTP_WEIGHT_REMAT_GLOBAL_RANKS"),
    _row("data_parallel with_gtp_remat", "dp gtp_remat", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    _row("data_parallel with_context_parallel with_gtp_remat", "dp cp gtp_remat",
         "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"),
    _row("expert_model_parallel", "ep", "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    _row("expert_tensor_parallel", "etp", "_EXPERT_TENSOR_PARALLEL_GROUP"),
    _row("expert_tensor_and_model_parallel", "ep etp", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    _row("expert_tensor_model_pipeline_parallel", "pp ep etp",
         "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    _row("expert_data_parallel", "edp", "_EXPERT_DATA_PARALLEL_GROUP", gloo=True),
    _row("expert_gtp_weight_remat", "egtp_remat",
         "_EXPERT_GTP_WEIGHT_REMAT_GROUP", "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS"),
    _row("expert_tensor_model_pipeline_parallel with_egtp_remat", "pp egtp_remat ep etp",
         "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP"),
    _row("expert_data_parallel with_gtp_remat", "edp egtp_remat",
         "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    _row("intra_distributed_optimizer_instance", "pp edp egtp_remat ep etp",
         "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"),
    _row("data_parallel with_context_parallel independent_all_gather", "dp cp",
         "_DATA_PARALLEL_GROUP_WITH_CP_AG", members="part"),
    _row("data_parallel with_context_parallel partial_data_parallel", "dp cp",
         "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", gloo=True, members="part"),
    _row("data_parallel with_context_parallel partial_data_parallel with_gtp_remat", "dp cp gtp_remat",
         "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", members="part"),
    _row("hierarchical_context_parallel", "cp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", members="part"),
    _row("hybrid_data_context_parallel", "dp cp", "_HYBRID_DP_CP_GROUPS", members="part"),
    _row("expert_data_parallel partial_expert_data_parallel", "edp",
         "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", gloo=True, members="part"),
    _row("expert_data_parallel partial_expert_data_parallel with_gtp_remat", "edp egtp_remat",
         "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", members="part"),
    _row("inter_distributed_optimizer_instance", "edp",
         "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", members="part"),
)
# fmt: on
"""Megatron's groups, in the order in which they are made; those with ``members="part"`` only on request.

``gtp_remat`` and ``egtp_remat`` are the axes over which weights are sharded that are gathered for each use. Where they
have size 1, a group that spans one is the group without it.
"""

_DEEPSPEED_KINDS = (
    GroupSpec("ds_model", ("pp", "tp")),
    GroupSpec("data", ("dp",)),
    GroupSpec("pipe", ("pp",)),
    GroupSpec("slice", ("tp",)),
)
_FAIRSCALE_KINDS = (
    _row("data", "dp", "_DATA_PARALLEL_GROUP"),
    _row("pipeline", "pp", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    _row("model", "tp", "_MODEL_PARALLEL_GROUP"),
    _row("context", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
)
_EZPZ_KINDS = (
    _row("data", "dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
    _row("pipeline", "pp", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    _row("context", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
    _row("tensor", "tp", "_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
)
_TORCHTITAN_KINDS = (
    *(GroupSpec(axis, (axis,)) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
    GroupSpec("batch", ("dp_replicate", "dp_shard")),
    GroupSpec("fsdp", ("dp_shard", "cp")),
    GroupSpec("loss", ("dp_replicate", "dp_shard", "cp")),
    *(GroupSpec(axis, (axis,), EXPERT) for axis in EXPERT_AXES),
)
_PROCESS_GROUPS_AXES = ("dp", "pp", "tp")

PLAIN = Dialect("mesh", AXES, ("pp", *EXPERT_AXES), orderable=True)
"""A mesh of namedmesh with the usual names: only the axes that are named exist."""

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "megatron",
            ("pp", "dp", "cp", "tp"),
            ("pp", *EXPERT_AXES),
            kinds=tuple(
                replace(row, axes=tuple(axis for axis in row.axes if not axis.endswith("gtp_remat")))
                for row in MEGATRON_GROUPS
                if row.members != "part" and "gtp" not in row.name
            ),
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
            shards=("pp", "dp_shard", "cp", "tp"),
            kinds=_TORCHTITAN_KINDS,
            etp_follows_tp=False,
        ),
        Dialect(
            "process_groups",
            _PROCESS_GROUPS_AXES,
            kinds=tuple(GroupSpec(axis, (axis,)) for axis in _PROCESS_GROUPS_AXES),
        ),
    )
}
"""The dialects by name. Ranks are row-major in the axes of each, the last one fastest."""


@dataclass(frozen=True)
class DialectLayout:
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
        """Return the layout of a view.

        Raises:
            LayoutError: there is no such view.
        """
        if view == EXPERT and self.expert is not None:
            return self.expert
        if view != DENSE:
            raise LayoutError(f"view {view!r} is not there; give a size for ep, edp or etp")
        return self.dense


class Order(NamedTuple):
    """An order string, read.

    Args:
        tokens: the axes, fastest first, with those that it omits at the end.
        omitted: the allowed axes that it does not name.
        unknown: what it names that is none of them.
        repeated: the allowed axes that it names more than once.
    """

    tokens: list[str]
    omitted: list[str]
    unknown: list[str]
    repeated: list[str]


def parse_order(order: str, allowed: Sequence[str]) -> Order:
    """Read an order string; whether its mistakes matter, and which error they are, is up to the dialect.

    Args:
        order: names of axes joined by hyphens, fastest first; lower case.
        allowed: the names that it may have.

    Example:
        >>> parse_order("tp-dpp", ("tp", "dp", "pp"))
        Order(tokens=['tp', 'dpp', 'dp', 'pp'], omitted=['dp', 'pp'], unknown=['dpp'], repeated=[])
    """
    tokens = order.split("-")
    omitted = [name for name in allowed if name not in tokens]
    unknown = [token for token in tokens if token not in allowed]
    return Order(tokens + omitted, omitted, unknown, [name for name in allowed if tokens.count(name) > 1])


def layouts_for(
    dialect: Dialect,
    sizes: Mapping[str, int],
    *,
    world_size: int | None = None,
    order: str | None = None,
) -> DialectLayout:
    """Return the layouts of a dialect for some sizes.

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
        >>> made = layouts_for(DIALECTS["megatron"], {"tp": 2, "pp": 4, "ep": 2}, world_size=16)
        >>> made.dense, made.expert
        (Layout(pp=4, dp=2, cp=1, tp=2), Layout(pp=4, edp=1, ep=2, etp=2))
    """
    _check_axes(dialect, sizes)
    sizes, notes = _shrunk(dialect, sizes, world_size)
    tokens = _tokens(dialect, sizes, order)
    dense_axes = [token for token in reversed(tokens) if token not in EXPERT_AXES]
    inferred = _inferred(dialect, sizes, dense_axes, world_size)
    requested = [
        axis for axis in dense_axes if dialect is not PLAIN or sizes.get(axis) is not None or axis == inferred
    ]
    filled = [sizes.get(axis, -1 if axis == inferred else 1) for axis in requested]
    dense = Layout.from_shape(requested, filled, world_size=world_size)
    expert = _expert(dialect, sizes, tokens, dense)
    if expert is not None and "pp" in dense and dense.partition("pp") != expert.partition("pp"):
        raise LayoutError(
            f"the pipelines of {dense} and of the experts' {expert} are not the same ranks; put pp first or last in the "
            f"order {'-'.join(tokens)!r}"
        )
    return DialectLayout(dialect, dense, expert, notes)


def groups_of(of_dialect: DialectLayout) -> tuple[GroupSpec, ...]:
    """Return the groups that a dialect makes; for a plain mesh one kind for each axis, and the usual products.

    Example:
        >>> [kind.name for kind in groups_of(layouts_for(PLAIN, {"pp": 2, "tp": 2}, world_size=8))]
        ['pp', 'dp', 'tp', 'model']
    """
    dense, expert = of_dialect.dense, of_dialect.expert
    if of_dialect.dialect.kinds:
        kinds = [kind for kind in of_dialect.dialect.kinds if kind.view == DENSE or expert is not None]
        if of_dialect.dialect.name == "fairscale" and dense["cp"] == 1:  # only later sources have cp
            kinds = [kind for kind in kinds if kind.axes != ("cp",)]
        return tuple(kinds)
    kinds = [GroupSpec(axis, (axis,)) for axis in dense]
    if expert is not None:
        kinds += [GroupSpec(axis, (axis,), EXPERT) for axis in expert if axis not in dense]
    data = tuple(axis for axis in (*_DATA, "cp") if axis in dense)
    if len(data) > 1:
        kinds.append(GroupSpec("batch and context" if "cp" in data else "batch", data))
    if "pp" in dense and "tp" in dense:
        kinds.append(GroupSpec("model", ("pp", "tp")))
    return tuple(kinds)


def _check_axes(dialect: Dialect, sizes: Mapping[str, int]) -> None:
    allowed = tuple(dict.fromkeys((*dialect.axes, *dialect.expert)))
    unknown = [axis for axis in sizes if axis not in allowed]
    if unknown:
        raise AxisError(
            *(
                f"axis {axis!r} is not one of {dialect.name}'s {allowed}{nearest_axis(axis, allowed)}"
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
    note = f"{dialect.name} reduces tp={tp} to the world of {world_size} ranks without an error"
    return {**sizes, "tp": world_size}, (note,)


def _inferred(
    dialect: Dialect, sizes: Mapping[str, int], axes: Sequence[str], world_size: int | None
) -> str | None:
    """Return the axis that takes what is left, unless a size says so itself or nothing is left to take."""
    if world_size is None or any(size == -1 for axis, size in sizes.items() if axis in axes):
        return None
    candidate = dialect.inferred
    if dialect is PLAIN and "dp" not in sizes and ("dp_replicate" in sizes or "dp_shard" in sizes):
        candidate = "dp_replicate" if "dp_shard" in sizes else "dp_shard"
    return candidate if candidate not in sizes and candidate in axes else None


def _tokens(dialect: Dialect, sizes: Mapping[str, int], order: str | None) -> list[str]:
    """Return the axes, fastest first; those that the order leaves out, of size 1, are the slowest."""
    default = dialect.order.split("-")
    if order is None:
        return default
    if not dialect.orderable:
        raise LayoutError(
            f"{dialect.name} has one order, {dialect.order!r}, not {order!r}; leave the order out, or the dialect"
        )
    parsed = parse_order(order, default)
    problems = [
        f"{token!r} in the order {order!r} is not one of {listing(default)}{did_you_mean(token, default)}"
        for token in parsed.unknown
    ]
    problems += [f"{token!r} is twice in the order {order!r}" for token in parsed.repeated]
    problems += [
        f"axis {axis!r} has size {size} but no place in the order {order!r}; add it"
        for axis, size in sizes.items()
        if size != 1 and axis in parsed.omitted
    ]
    if problems:
        raise AxisError(*problems)
    return parsed.tokens


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
    data = [axis for axis in _DATA if axis in dense] or _DATA  # an order may name only some of them
    names |= {axis: "edp" for axis in data if axis != kept}
    axes = list(dict.fromkeys(names[token] for token in reversed(tokens) if token in names))
    etp = dense["tp"] if dialect.etp_follows_tp and "tp" in dense else 1
    inferred = -1 in [sizes.get(axis) for axis in EXPERT_AXES]
    known = {"etp": etp, "edp": 1 if inferred else -1, **sizes}
    known |= {axis: dense[axis] for axis in axes if axis in dense}
    return Layout.from_shape(axes, [known.get(axis, 1) for axis in axes], world_size=dense.world_size)
