"""The rank tables of the dialects: which axes each API has, in which order, and which groups it makes of them.

Pure data and arithmetic on :class:`namedmesh.Layout`, for the dialects, the planner and the migration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from namedmesh.axes import DATA_AXES, DENSE_AXES, EXPERT_AXES, TOKEN_AXES
from namedmesh.errors import AxisError, LayoutError, did_you_mean, listing
from namedmesh.layout import Layout
from namedmesh.sizes import nearest_axis

DENSE, EXPERT = "dense", "expert"

Members = Literal["all", "ends", "first", "instance", "peers", "second", "several"]
"""All ranks over some axes, the two ends, or the first. On request only: those of this rank's optimizer instance, the ranks at
its place in the others, a second group over all ranks, or several groups."""


class GroupSpec(NamedTuple):
    """One kind of process group: a row of a dialect's table.

    Its name is the accessor's without ``get_`` and ``_group``, with the flags that it takes. Its ``axes``, of a ``view``, vary
    inside a group. The last three are the original's variables with the group, its ranks, and the gloo group over them.
    """

    name: str
    axes: tuple[str, ...]
    view: str = DENSE
    members: Members = "all"
    variable: str = ""
    ranks: str = ""
    gloo: str = ""


class Dialect(NamedTuple):
    """How one API lays out ranks."""

    name: str
    axes: tuple[str, ...]  # of its dense layout, slowest first
    kinds: tuple[GroupSpec, ...] = ()  # the groups that it makes; by default one kind for each axis
    has_experts: bool = False  # with a layout of their own; its user chooses the order
    shrinks_tp: bool = False  # to the world, where it is larger


def _row(
    name: str, axes: str, variable: str = "", ranks: str = "", *, gloo: bool = False, members: Members = "all"
) -> GroupSpec:
    view = EXPERT if axes.rsplit(maxsplit=1)[-1] in EXPERT_AXES else DENSE
    return GroupSpec(
        name, tuple(axes.split()), view, members, variable, ranks, f"{variable}_GLOO" if gloo else ""
    )


# fmt: off
MEGATRON_GROUPS = (
    _row("data_parallel with_context_parallel", "dp cp",
         "_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", gloo=True),
    _row("data_parallel", "dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS", gloo=True),
    _row("context_parallel", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    _row("model_parallel", "pp tp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    _row("tensor_model_parallel", "tp",
         "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    _row("pipeline_model_parallel", "pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    _row("embedding", "pp", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS", members="ends"),
    _row("position_embedding", "pp",
         "_POSITION_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GLOBAL_RANKS", members="first"),
    _row("tensor_and_data_parallel with_context_parallel", "dp cp tp",
         "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    _row("tensor_and_data_parallel", "dp tp", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    _row("tensor_and_context_parallel", "cp tp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    _row("expert_model_parallel", "ep", "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    _row("expert_tensor_parallel", "etp", "_EXPERT_TENSOR_PARALLEL_GROUP"),
    _row("expert_tensor_and_model_parallel", "ep etp", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    _row("expert_tensor_model_pipeline_parallel", "pp ep etp",
         "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    _row("expert_data_parallel", "edp", "_EXPERT_DATA_PARALLEL_GROUP", gloo=True),
    _row("intra_distributed_optimizer_instance", "pp edp ep etp",
         "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"),
    _row("data_parallel with_context_parallel independent_all_gather", "dp cp",
         "_DATA_PARALLEL_GROUP_WITH_CP_AG", members="second"),
    _row("data_parallel with_context_parallel partial_data_parallel", "dp cp",
         "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", gloo=True, members="instance"),
    _row("hierarchical_context_parallel", "cp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", members="several"),
    _row("hybrid_data_context_parallel", "dp cp", "_HYBRID_DP_CP_GROUPS", members="several"),
    _row("expert_data_parallel partial_expert_data_parallel", "edp",
         "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", gloo=True, members="instance"),
    _row("inter_distributed_optimizer_instance", "edp",
         "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", members="peers"),
)
# fmt: on
"""Megatron's groups, in the order in which they are made."""

_MEGATRON_KINDS = tuple(row for row in MEGATRON_GROUPS if row.members in {"all", "ends", "first"})
_DEEPSPEED_KINDS = (_row("ds_model", "pp tp"), _row("data", "dp"), _row("pipe", "pp"), _row("slice", "tp"))
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
PLAIN = Dialect("mesh", DENSE_AXES, has_experts=True)
"""A mesh of namedmesh with the usual names: only the axes that are named exist."""
_ALL = (
    Dialect("megatron", ("pp", "dp", "cp", "tp"), _MEGATRON_KINDS, has_experts=True),
    Dialect("deepspeed", ("pp", "dp", "tp"), _DEEPSPEED_KINDS),
    Dialect("fairscale", ("dp", "pp", "cp", "tp"), _FAIRSCALE_KINDS, shrinks_tp=True),
    Dialect("ezpz", ("dp", "pp", "cp", "tp"), _EZPZ_KINDS, shrinks_tp=True),
)
DIALECTS = {dialect.name: dialect for dialect in _ALL}
"""The dialects by name. Ranks are row-major in the axes of each, the last one fastest."""


class DialectLayout(NamedTuple):
    """The ranks of a job: the layout of everything but the experts, and theirs, if they have one of their own.

    ``notes`` are what the dialect changed about the sizes that were asked for.
    """

    dialect: Dialect
    dense: Layout
    expert: Layout | None = None
    notes: tuple[str, ...] = ()

    def layout(self, view: str) -> Layout:
        """Return the layout of a view that is there."""
        return self.expert if view == EXPERT and self.expert is not None else self.dense


class Order(NamedTuple):
    """An order string: its axes, fastest first, and at the end those that it omits; and these alone."""

    tokens: list[str]
    omitted: list[str]


def parse_order(order: str, axes: Sequence[str]) -> Order:
    """Read names of axes joined by hyphens, fastest first; whether mistakes matter, and which error they are, is up to the dialect.

    Example:
        >>> parse_order("tp-dpp", ("tp", "dp", "pp"))
        Order(tokens=['tp', 'dpp', 'dp', 'pp'], omitted=['dp', 'pp'])
    """
    tokens = order.split("-")
    omitted = [axis for axis in axes if axis not in tokens]
    return Order(tokens + omitted, omitted)


def layouts_for(
    dialect: Dialect, sizes: Mapping[str, int], *, world_size: int | None = None, order: str | None = None
) -> DialectLayout:
    """Return the layouts of a dialect for some sizes, and a world of ranks; by default as many as the sizes need.

    An axis without a size is 1, but ``dp`` whatever is left of the world, unless another one is that or it has two parts. An
    order is fastest first, with ``ep`` where the experts' axis goes; ``etp`` and ``edp`` take the places of ``tp`` and ``dp``.

    Raises:
        AxisError: an axis that the dialect does not have, or that the order does not name.
        LayoutError: sizes that do not fit, or an order under which the experts' pipelines are other ranks.

    Example:
        >>> made = layouts_for(DIALECTS["megatron"], {"tp": 2, "pp": 4, "ep": 2}, world_size=16)
        >>> made.dense, made.expert
        (Layout(pp=4, dp=2, cp=1, tp=2), Layout(pp=4, edp=1, ep=2, etp=2))
    """
    allowed = (*dialect.axes, *EXPERT_AXES) if dialect.has_experts else dialect.axes
    problems = [
        f"axis {axis!r} is not one of {dialect.name}'s {allowed}{nearest_axis(axis, allowed)}"
        for axis in sizes
        if axis not in allowed
    ]
    if problems:
        raise AxisError(*problems)
    notes = []
    if dialect.shrinks_tp and world_size is not None and sizes.get("tp", 1) > world_size:
        old = sizes["tp"]
        notes.append(f"{dialect.name} reduces tp={old} to the world of {world_size} ranks without an error")
        sizes = {**sizes, "tp": world_size}
    tokens = _tokens(dialect, sizes, order)
    axes = [token for token in reversed(tokens) if token not in EXPERT_AXES]
    inferred = -1 in [sizes.get(axis) for axis in axes]
    if world_size is not None and not inferred and sizes.keys().isdisjoint(DATA_AXES):
        sizes = {**sizes, "dp": -1}
    if dialect is PLAIN:
        axes = [axis for axis in axes if axis in sizes]
    dense = Layout.from_shape(axes, [sizes.get(axis, 1) for axis in axes], world_size=world_size)
    expert = _expert(dialect, sizes, tokens, dense)
    if expert is not None and "pp" in dense and dense.partition("pp") != expert.partition("pp"):
        raise LayoutError(
            f"the pipelines of {dense} and of the experts' {expert} are not the same ranks; put pp first or last in the "
            f"order {'-'.join(tokens)!r}"
        )
    return DialectLayout(dialect, dense, expert, tuple(notes))


def groups_of(of_dialect: DialectLayout) -> tuple[GroupSpec, ...]:
    """Return the groups that a dialect makes; for a plain mesh one kind for each axis, and the usual products.

    Example:
        >>> [kind.name for kind in groups_of(layouts_for(PLAIN, {"pp": 2, "tp": 2}, world_size=8))]
        ['pp', 'dp', 'tp', 'model']
    """
    dialect, dense, expert = of_dialect.dialect, of_dialect.dense, of_dialect.expert
    if dialect.kinds:
        kinds = [kind for kind in dialect.kinds if kind.view == DENSE or expert is not None]
        if dialect.name == "fairscale" and dense["cp"] == 1:  # only later sources have cp
            kinds.pop()
        return tuple(kinds)
    kinds = [_row(axis, axis) for axis in dict.fromkeys((*dense, *(expert or ())))]
    data = [axis for axis in DENSE_AXES if axis in TOKEN_AXES and axis in dense]
    if len(data) > 1:
        kinds.append(_row("batch and context" if "cp" in data else "batch", " ".join(data)))
    if "pp" in dense and "tp" in dense:
        kinds.append(_row("model", "pp tp"))
    return tuple(kinds)


def _tokens(dialect: Dialect, sizes: Mapping[str, int], order: str | None) -> list[str]:
    """Return the axes, fastest first, with ep before the data axes; those that an order leaves out, of size 1, are the slowest."""
    default = list(reversed(dialect.axes))
    if dialect.has_experts:
        default.insert(default.index("dp"), "ep")
    if order is None:
        return default
    if not dialect.has_experts:
        raise LayoutError(
            f"{dialect.name} has one order, {'-'.join(default)!r}, not {order!r}; leave the order out, or the dialect"
        )
    parsed = parse_order(order, default)
    problems = [
        f"{token!r} in the order {order!r} is not one of {listing(default)}{did_you_mean(token, default)}"
        for token in parsed.tokens
        if token not in default
    ]
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
    if sizes.keys().isdisjoint(EXPERT_AXES) and dialect.name != "megatron":
        return None
    # An order may name only some of the data axes.
    data = [axis for axis in DATA_AXES if axis in dense] or DATA_AXES
    names = {**dict.fromkeys(data, "edp"), "pp": "pp", "ep": "ep", "tp": "etp"}
    axes = list(dict.fromkeys(names[token] for token in reversed(tokens) if token in names))
    etp = dense.size("tp") if "tp" in dense else 1
    inferred = -1 in [sizes.get(axis) for axis in EXPERT_AXES]
    known = {"etp": etp, "edp": 1 if inferred else -1, **sizes}
    known |= {axis: dense[axis] for axis in axes if axis in dense}
    return Layout.from_shape(axes, [known.get(axis, 1) for axis in axes], world_size=dense.world_size)
