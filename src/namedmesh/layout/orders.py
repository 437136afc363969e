"""How each legacy API lays out ranks, and which process groups it makes.

This module is pure data and arithmetic on :class:`namedmesh.Layout`. The compatibility layers, the
planner and the migration read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from namedmesh._errors import AxisError, LayoutError, did_you_mean, format_items
from namedmesh.layout.axes import DATA_AXES, DENSE_AXES, EXPERT_AXES, TOKEN_AXES
from namedmesh.layout.layout import Layout, make_partition_key
from namedmesh.layout.sizes import suggest_axis

DENSE = "dense"
"""The view of everything except the experts."""

EXPERT = "expert"
"""The view of the experts, which have a layout of their own."""

Members = Literal["all", "ends", "first", "instance", "peers", "second", "several"]
"""Which ranks along its axes belong to a group.

- ``"all"``, ``"ends"`` and ``"first"``: all ranks, the first and the last one, the first one. A
  mesh determines these groups.
- ``"instance"``: the ranks of the same optimizer instance. This group and the following ones are
  made on request only.
- ``"peers"``: the ranks with the same position in every optimizer instance.
- ``"second"``: all ranks, as a second group in addition to the first one.
- ``"several"``: a list of groups.
"""


class GroupSpec(NamedTuple):
    """One kind of process group of a legacy API.

    Attributes:
        name: the name of its accessor without ``get_`` and ``_group``, followed by the flags that
            the accessor takes.
        axes: the axes along which the ranks of a group differ.
        view: the layout to which the axes belong, ``DENSE`` or ``EXPERT``.
        members: which ranks along the axes belong to a group.
        variable: the upstream variable that holds the group.
        ranks: the upstream variable that holds the global ranks of the group, if there is one.
        gloo: the upstream variable that holds an additional gloo group of the same ranks, if there
            is one.
    """

    name: str
    axes: tuple[str, ...]
    view: str = DENSE
    members: Members = "all"
    variable: str = ""
    ranks: str = ""
    gloo: str = ""


class ParallelApi(NamedTuple):
    """An API that makes process groups: how it lays out ranks, and which groups it makes.

    Attributes:
        name: the name by which users choose it, such as ``"megatron"``.
        axes: the axes of its dense layout, slowest first. Ranks are row-major in them.
        groups: the groups that it makes; empty if it makes one group for each axis.
        has_experts: whether it has a second layout for experts, and an order that its user chooses.
        shrinks_tp: whether it reduces a tp size that is larger than the world, instead of raising
            an error.
    """

    name: str
    axes: tuple[str, ...]
    groups: tuple[GroupSpec, ...] = ()
    has_experts: bool = False
    shrinks_tp: bool = False


def _group(
    name: str, axes: str, variable: str = "", ranks: str = "", *, gloo: bool = False, members: Members = "all"
) -> GroupSpec:
    """Make a row of the tables below from axes that are separated by blanks."""
    names = tuple(axes.split())
    view = EXPERT if names[-1] in EXPERT_AXES else DENSE
    # Upstream names every gloo variable after the variable of the group.
    gloo_variable = f"{variable}_GLOO" if gloo else ""
    return GroupSpec(name, names, view, members, variable, ranks, gloo_variable)


# Rows stay on one line if they fit, so that the table can be compared with upstream's code.
# fmt: off
MEGATRON_GROUPS = (
    _group("data_parallel with_context_parallel", "dp cp",
         "_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", gloo=True),
    _group("data_parallel", "dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS", gloo=True),
    _group("context_parallel", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    _group("model_parallel", "pp tp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    _group("tensor_model_parallel", "tp",
         "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    _group("pipeline_model_parallel", "pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    # Stages that share the embedding's weights: the first one embeds, the last one computes logits.
    _group("embedding", "pp", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS", members="ends"),
    _group("position_embedding", "pp",
         "_POSITION_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GLOBAL_RANKS", members="first"),
    _group("tensor_and_data_parallel with_context_parallel", "dp cp tp",
         "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    _group("tensor_and_data_parallel", "dp tp", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    _group("tensor_and_context_parallel", "cp tp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    _group("expert_model_parallel", "ep", "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    _group("expert_tensor_parallel", "etp", "_EXPERT_TENSOR_PARALLEL_GROUP"),
    _group("expert_tensor_and_model_parallel", "ep etp", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    _group("expert_tensor_model_pipeline_parallel", "pp ep etp",
         "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    _group("expert_data_parallel", "edp", "_EXPERT_DATA_PARALLEL_GROUP", gloo=True),
    # By default there is one optimizer instance, which has all ranks: every axis of the expert
    # view.
    _group("intra_distributed_optimizer_instance", "pp edp ep etp",
         "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"),
    _group("data_parallel with_context_parallel independent_all_gather", "dp cp",
         "_DATA_PARALLEL_GROUP_WITH_CP_AG", members="second"),
    _group("data_parallel with_context_parallel partial_data_parallel", "dp cp",
         "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", gloo=True, members="instance"),
    _group("hierarchical_context_parallel", "cp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", members="several"),
    _group("hybrid_data_context_parallel", "dp cp", "_HYBRID_DP_CP_GROUPS", members="several"),
    _group("expert_data_parallel partial_expert_data_parallel", "edp",
         "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", gloo=True, members="instance"),
    _group("inter_distributed_optimizer_instance", "edp",
         "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", members="peers"),
)
# fmt: on
"""Megatron's groups, in the order in which Megatron makes them."""


# The remaining groups are made on request only.
_MEGATRON_MESH_GROUPS = tuple(row for row in MEGATRON_GROUPS if row.members in {"all", "ends", "first"})
# DeepSpeed's groups are named after the attributes of its grid, such as ds_model_proc_group.
_DEEPSPEED_GROUPS = (
    _group("ds_model", "pp tp"),
    _group("data", "dp"),
    _group("pipe", "pp"),
    _group("slice", "tp"),
)
# fairscale stores the ranks of two groups only. Its context parallelism is not in any release.
_FAIRSCALE_GROUPS = (
    _group("data", "dp", "_DATA_PARALLEL_GROUP"),
    _group("pipeline", "pp", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    _group("model", "tp", "_MODEL_PARALLEL_GROUP"),
    _group("context", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
)
_EZPZ_GROUPS = (
    _group("data", "dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
    _group("pipeline", "pp", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    _group("context", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
    _group("tensor", "tp", "_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
)

# The axes that only the experts' layout has. The last one is Megatron's, for weights that are gathered
# for each use.
_EXPERT_ONLY = (*EXPERT_AXES, "egtp_remat")

NAMEDMESH_API = ParallelApi("mesh", DENSE_AXES, has_experts=True)
"""namedmesh itself, with the usual axis names. Its layouts have only the axes with a size."""

# fairscale and ezpz put the data axis outside of the pipeline axis. Megatron and DeepSpeed do not.
LEGACY_APIS = {
    "megatron": ParallelApi("megatron", ("pp", "dp", "cp", "tp"), _MEGATRON_MESH_GROUPS, has_experts=True),
    "deepspeed": ParallelApi("deepspeed", ("pp", "dp", "tp"), _DEEPSPEED_GROUPS),
    "fairscale": ParallelApi("fairscale", ("dp", "pp", "cp", "tp"), _FAIRSCALE_GROUPS, shrinks_tp=True),
    "ezpz": ParallelApi("ezpz", ("dp", "pp", "cp", "tp"), _EZPZ_GROUPS, shrinks_tp=True),
}
"""The legacy APIs by name."""


class JobLayout(NamedTuple):
    """How an API lays out the ranks of one job.

    Attributes:
        api: the API.
        dense: the layout of everything except the experts.
        expert: the layout of the experts, if they have one.
        notes: messages about sizes that the API changed.
    """

    api: ParallelApi
    dense: Layout
    expert: Layout | None = None
    notes: tuple[str, ...] = ()

    def get_layout(self, view: str) -> Layout:
        """Return the layout of a view; the dense one if the job has no layout of experts.

        Args:
            view: ``DENSE`` or ``EXPERT``.
        """
        if view == EXPERT and self.expert is not None:
            return self.expert
        return self.dense


def split_order(order: str, axes: Sequence[str]) -> list[str]:
    """Split an order string into axis names, and append the axes that it omits.

    The caller checks the names, because each API raises its own errors.

    Args:
        order: axis names that are joined by hyphens, fastest first.
        axes: the axes that the API knows.

    Example:
        >>> split_order("tp-dpp", ("tp", "dp", "pp"))
        ['tp', 'dpp', 'dp', 'pp']
    """
    tokens = order.split("-")
    return tokens + [axis for axis in axes if axis not in tokens]


def shrink_tp(api: ParallelApi, sizes: dict[str, int], world_size: int | None) -> tuple[str, ...]:
    """Reduce a tp size that is larger than the world, in place, if the API does so.

    Args:
        api: the API.
        sizes: the size of each axis.
        world_size: the number of ranks, if it is known.

    Returns:
        A message about it; nothing if the size stays as it is.
    """
    tp_size = sizes.get("tp", 1)
    if not api.shrinks_tp or world_size is None or tp_size <= world_size:
        return ()
    sizes["tp"] = world_size
    return (f"{api.name} reduces tp={tp_size} to the world of {world_size} ranks without an error",)


def order_dense_sizes(tokens: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each axis of the dense layout, slowest first; 1 without a size.

    Args:
        tokens: the axes of a job, fastest first, also those of the experts.
        sizes: the sizes by axis.
    """
    return {axis: sizes.get(axis, 1) for axis in reversed(tokens) if axis not in _EXPERT_ONLY}


def order_expert_sizes(tokens: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each axis of the experts' layout, slowest first.

    ``etp`` and ``edp`` take the positions of ``tp`` and the first data axis. By default, their
    sizes are the size of ``tp``, and as many ranks as are left.

    Args:
        tokens: the axes of a job, fastest first.
        sizes: the sizes by axis.
    """
    expert_names = {axis: axis for axis in ("pp", "ep", "egtp_remat")} | {"tp": "etp"}
    # An omitted data axis comes last, but must not move edp there, so only data axes count that have
    # a size.
    for axis in {*DATA_AXES} & {*sizes} or DATA_AXES:
        expert_names[axis] = "edp"
    defaults = {"etp": sizes.get("tp", 1)}
    if not _has_inferred_size(sizes, EXPERT_AXES):
        defaults["edp"] = -1
    expert_sizes: dict[str, int] = {}
    for token in reversed(tokens):
        if token in expert_names:
            axis = expert_names[token]
            expert_sizes[axis] = sizes.get(axis, defaults.get(axis, 1))
    return expert_sizes


def compute_layouts(
    api: ParallelApi, sizes: Mapping[str, int], *, world_size: int | None = None, order: str | None = None
) -> JobLayout:
    """Compute the layouts that an API uses for given sizes.

    Args:
        api: the API.
        sizes: the size of each axis, or -1 for as many ranks as are left. An axis without a size
            has size 1. If ``world_size`` is given and no data axis has a size, ``dp`` is -1, unless
            another dense axis is.
        world_size: the number of ranks; by default as many as the sizes need.
        order: axis names that are joined by hyphens, fastest first, with ``ep`` at the position of
            the experts' axis; by default the API's own order. In the layout of the experts, ``etp``
            and ``edp`` take the positions of ``tp`` and ``dp``.

    Returns:
        The layouts, and messages about sizes that the API changed.

    Raises:
        AxisError: the API does not have an axis, or the order does not name it.
        LayoutError: the sizes do not fit, or the order would give the experts other pipelines.

    Example:
        >>> job = compute_layouts(LEGACY_APIS["megatron"], {"tp": 2, "pp": 4, "ep": 2}, world_size=16)
        >>> job.dense, job.expert
        (Layout(pp=4, dp=2, cp=1, tp=2), Layout(pp=4, edp=1, ep=2, etp=2))
    """
    _check_axis_names(api, sizes)
    sizes = dict(sizes)
    notes = shrink_tp(api, sizes, world_size)
    tokens = _list_tokens(api, sizes, order)
    has_data_size = not sizes.keys().isdisjoint(DATA_AXES)
    if world_size is not None and not has_data_size and not _has_inferred_size(sizes, api.axes):
        sizes["dp"] = -1
    dense_sizes = order_dense_sizes(tokens, sizes)
    if api is NAMEDMESH_API:
        dense_sizes = {axis: size for axis, size in dense_sizes.items() if axis in sizes}
    dense = Layout.from_shape(list(dense_sizes), list(dense_sizes.values()), world_size=world_size)
    # Megatron makes the groups of experts in every job.
    if sizes.keys().isdisjoint(EXPERT_AXES) and api.name != "megatron":
        return JobLayout(api, dense, None, notes)

    # The pipeline axis belongs to both layouts, and its size is known by now.
    expert_sizes = order_expert_sizes(tokens, sizes | dict(dense.items()))
    expert = Layout.from_shape(list(expert_sizes), list(expert_sizes.values()), world_size=dense.world_size)
    # A stage holds dense layers and experts, so a pipeline must have the same ranks in both
    # layouts.
    if "pp" in dense and make_partition_key(dense, "pp") != make_partition_key(expert, "pp"):
        raise LayoutError(
            f"the pipelines of {dense} and of the experts' {expert} are not the same ranks; put "
            f"pp first or last in the order {'-'.join(tokens)!r}"
        )
    return JobLayout(api, dense, expert, notes)


def list_groups(job: JobLayout) -> tuple[GroupSpec, ...]:
    """Return the groups that an API makes in a job.

    namedmesh makes one for each axis, and those over the usual flattened axes.

    Args:
        job: the layouts of the job.

    Example:
        >>> job = compute_layouts(NAMEDMESH_API, {"pp": 2, "tp": 2}, world_size=8)
        >>> [group.name for group in list_groups(job)]
        ['pp', 'dp', 'tp', 'model']
    """
    if not job.api.groups:
        return _list_axis_groups(job)
    groups = []
    for group in job.api.groups:
        # Published releases of fairscale do not have cp; later sources make its groups.
        is_missing_upstream = job.api.name == "fairscale" and group.axes == ("cp",) and job.dense["cp"] == 1
        has_view = group.view == DENSE or job.expert is not None
        if has_view and not is_missing_upstream:
            groups.append(group)
    return tuple(groups)


def _list_axis_groups(job: JobLayout) -> tuple[GroupSpec, ...]:
    """Return a group for each axis, and the groups over all token axes and over pp and tp."""
    axes = list(job.dense)
    for axis in job.expert or ():
        if axis not in axes:
            axes.append(axis)
    groups = [_group(axis, axis) for axis in axes]
    token_axes = [axis for axis in DENSE_AXES if axis in TOKEN_AXES and axis in job.dense]
    if len(token_axes) > 1:
        name = "batch and context" if "cp" in token_axes else "batch"
        groups.append(_group(name, " ".join(token_axes)))
    if "pp" in job.dense and "tp" in job.dense:
        groups.append(_group("model", "pp tp"))
    return tuple(groups)


def _check_axis_names(api: ParallelApi, sizes: Mapping[str, int]) -> None:
    """Raise an AxisError for axes that an API does not have."""
    allowed = (*api.axes, *EXPERT_AXES) if api.has_experts else api.axes
    problems = []
    for axis in sizes:
        if axis not in allowed:
            near = suggest_axis(axis, allowed)
            problems.append(f"axis {axis!r} is not one of {api.name}'s {allowed}{near}")
    if problems:
        raise AxisError(*problems)


def _list_tokens(api: ParallelApi, sizes: Mapping[str, int], order: str | None) -> list[str]:
    """Return the axes of a job, fastest first, with ``ep`` among them.

    Axes that an order omits come last.

    Raises:
        AxisError: the order names an unknown axis, or omits one whose size is not 1.
        LayoutError: the API has only one order, or the order names an axis twice.
    """
    default = list(reversed(api.axes))
    if api.has_experts:
        # The experts are sharded across neighboring data-parallel ranks, as in Megatron.
        default.insert(default.index("dp"), "ep")
    if order is None:
        return default
    if not api.has_experts:
        raise LayoutError(
            f"{api.name} has one order, {'-'.join(default)!r}, got {order!r}; omit the order, "
            f"or omit {api.name!r}"
        )
    tokens = split_order(order, default)
    problems = []
    for token in tokens:
        if token not in default:
            near = did_you_mean(token, default)
            problems.append(f"{token!r} in the order {order!r} is not one of {format_items(default)}{near}")
    for axis, size in sizes.items():
        if size != 1 and axis in default and axis not in order.split("-"):
            problems.append(f"axis {axis!r} has size {size} but is missing from the order {order!r}; add it")
    if problems:
        raise AxisError(*problems)
    if len({*tokens}) < len(tokens):
        raise LayoutError(f"the order {order!r} names an axis twice; name each axis once")
    return tokens


def _has_inferred_size(sizes: Mapping[str, int], axes: Sequence[str]) -> bool:
    """Return whether the size of one of the axes is -1, for as many ranks as are left."""
    return any(sizes.get(axis) == -1 for axis in axes)
