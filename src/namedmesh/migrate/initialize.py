"""The calls that take sizes, ``initialize_model_parallel`` and ``RankGenerator``, argument by argument."""

from __future__ import annotations

import ast

from namedmesh.dialects import DIALECTS, DialectLayout, layouts_for
from namedmesh.errors import NamedMeshError, listing
from namedmesh.migrate.rules import Advice, Arguments, Row, view_statement

_DENSE_SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
_MEGATRON = DIALECTS["megatron"]
_INSTANCES = "num_distributed_optimizer_instances"
_LEVELS = "hierarchical_context_parallel_sizes"
_BACKEND, _NCCL = "pipeline_model_parallel_comm_backend", "nccl_communicator_config_path"
# Arguments that are no sizes, and what to do about each where it is given.
_NOTES = {
    "virtual_pipeline_model_parallel_size": "virtual stages are no axis: keep their number in a variable of your own",
    "use_sharp": "SHARP is an NCCL setting of an axis: GroupOptions(nccl={'collnet_enable': 1})",
    "hybrid_context_parallel": "each hybrid group size is a view of its own: mesh.add_view('hybrid', ...)",
    _NCCL: "the keys of the NCCL file are names of axes: ep_tp is etp, ep_dp is edp",
    "get_embedding_ranks": "groups that no axis spans are made with torch.distributed.new_subgroups_by_enumeration, "
    "from mesh.layout.groups('pp')",
    "high_priority_stream_groups": "pass options={axis: GroupOptions(high_priority=True)} for each of the groups",
}
_ORDER_UNKNOWN = "the order is not a literal: layouts of the mesh have no 'ep', so leave it out of the string; views follow the order"
_NOT_ADJOINING = f"{_INSTANCES} cuts dp and cp together, which this order keeps apart; its groups are no view"


def _layout_advice(arguments: Arguments) -> Advice:
    """Return the layout that replaces a ``RankGenerator``."""
    names = sorted(
        (name for name in arguments.named if name != "order"), key=lambda name: name == "rank_offset"
    )
    sizes = "".join(f", {name}={ast.unparse(arguments.named[name])}" for name in names)
    return Advice(
        f"namedmesh.Layout.from_order({arguments.source('order')}{sizes})",
        notes=("get_ranks('tp-dp') is layout.groups('tp', 'dp')",),
    )


def _mesh_advice(arguments: Arguments) -> Advice:
    """Return the mesh, and the views, that replace ``initialize_model_parallel``."""
    given_order = arguments.named.get("order", ast.Constant(_MEGATRON.order))
    order = given_order.value if isinstance(given_order, ast.Constant) else None
    try:
        arrangement = layouts_for(_MEGATRON, {}, order=order.lower() if isinstance(order, str) else None)
    except NamedMeshError:  # of an order that is invalid the mesh says so
        arrangement = layouts_for(_MEGATRON, {})
    sizes = {axis: arguments.size(name) for axis, name in _DENSE_SIZES.items()} | {"dp": "-1"}
    axes = list(arrangement.dense)
    if not arguments.is_one("gtp_remat_size"):
        sizes["gtp_remat"] = arguments.size("gtp_remat_size")
        axes.insert(axes.index("tp"), "gtp_remat")
    notes = [note for name, note in _NOTES.items() if not arguments.is_off(name)]
    unknown = [name for name in arguments.named if name not in _KNOWN]
    if unknown:
        notes.append(f"what the arguments {listing(unknown)} ask for is missing here")
    if not isinstance(order, str):
        named = ", ".join(f"{axis}={sizes[axis]}" for axis in ("tp", "cp", "pp"))
        order_source = arguments.source("order")
        world = "world_size=torch.distributed.get_world_size()"
        given = [f"namedmesh.Layout.from_order({order_source}, {named}, {world})"]
        notes.append(_ORDER_UNKNOWN)
    else:
        given = [f"{axis}={sizes[axis]}" for axis in axes]
    if arguments.rest:
        notes.append(f"what {arguments.rest} holds is not known here; sizes given there are missing")
    views, view_notes = _views(arguments, arrangement, sizes)
    given += _settings(arguments)
    return Advice(f"namedmesh.init_mesh({', '.join(given)})", tuple(views), (*notes, *view_notes))


def _settings(arguments: Arguments) -> list[str]:
    """Return the keywords of ``init_mesh`` that are no sizes."""
    settings = []
    if "distributed_timeout_minutes" in arguments.named:
        minutes = arguments.size("distributed_timeout_minutes")
        settings.append(f"timeout=datetime.timedelta(minutes={minutes})")
    from_file = f"namedmesh.GroupOptions.from_yaml({arguments.source(_NCCL)})"
    backend = f'"pp": namedmesh.GroupOptions(backend={arguments.source(_BACKEND)})'
    if not arguments.is_off(_BACKEND):
        pairs = backend if arguments.is_off(_NCCL) else f"**{from_file}, {backend}"
        settings.append(f"options={{{pairs}}}")
    elif not arguments.is_off(_NCCL):
        settings.append(f"options={from_file}")
    return settings


def _views(
    arguments: Arguments, arrangement: DialectLayout, dense: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Return the views that the arguments ask for, and remarks about groups that no view has."""
    etp_follows_tp = arguments.is_off("expert_tensor_parallel_size")
    instances = arguments.size(_INSTANCES)
    sizes = {
        **dense,
        "etp": dense["tp"] if etp_follows_tp else arguments.size("expert_tensor_parallel_size"),
        "ep": arguments.size("expert_model_parallel_size"),
        "egtp_remat": arguments.size("expert_gtp_remat_size"),
        "edp": "-1",
        "dp_replicate": instances,
        "dp_shard": "-1",
        "edp_replicate": instances,
        "edp_shard": "-1",
    }
    several = not arguments.is_one(_INSTANCES)
    with_remat = not arguments.is_one("expert_gtp_remat_size")
    views: list[str] = []
    notes: list[str] = []
    if with_remat or not (arguments.is_one("expert_model_parallel_size") and etp_follows_tp):
        axes = list(arrangement.expert or ())
        if with_remat:
            axes.insert(axes.index("ep"), "egtp_remat")
        views.append(_view("expert", axes, sizes))
        if several:
            views.append(_view("expert_optimizer", _split(axes, "edp"), sizes))
    if several:
        axes = list(arrangement.dense.axes)
        if not arguments.is_one(_DENSE_SIZES["cp"]) and abs(axes.index("dp") - axes.index("cp")) > 1:
            notes.append(_NOT_ADJOINING)
        else:
            axes.remove("cp")
            views.append(_view("optimizer", _split(axes, "dp"), sizes))
    if not arguments.is_off("create_all_gather_group"):
        views.append(view_statement("gather"))
    levels = arguments.named.get(_LEVELS)
    if isinstance(levels, (ast.List, ast.Tuple)) and levels.elts:
        views.append(view_statement("levels").replace(f"{_LEVELS}[0]", ast.unparse(levels.elts[0])))
    elif not arguments.is_off(_LEVELS):
        views.append(view_statement("levels").replace(_LEVELS, arguments.source(_LEVELS)))
    return views, notes


def _split(axes: list[str], axis: str) -> list[str]:
    """Split one axis into the optimizer instances and the rest."""
    place = axes.index(axis)
    return [*axes[:place], f"{axis}_replicate", f"{axis}_shard", *axes[place + 1 :]]


def _view(name: str, axes: list[str], sizes: dict[str, str]) -> str:
    return f'mesh.add_view("{name}", {", ".join(f"{axis}={sizes[axis]}" for axis in axes)})'


INITIALIZE = Row(
    "initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, "
    "virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_comm_backend=None, use_sharp=False, "
    "context_parallel_size=1, hierarchical_context_parallel_sizes=None, hybrid_context_parallel=False, "
    "expert_model_parallel_size=1, num_distributed_optimizer_instances=1, expert_tensor_parallel_size=None, "
    "nccl_communicator_config_path=None, distributed_timeout_minutes=30, order='tp-cp-ep-dp-pp', "
    "get_embedding_ranks=None, get_position_embedding_ranks=None, create_gloo_process_groups=True, "
    "high_priority_stream_groups=None, sharp_enabled_group=None, create_all_gather_group=False)",
    examples=(
        "tensor_model_parallel_size=2, pipeline_model_parallel_size=4",
        "tensor_model_parallel_size=2, context_parallel_size=2",
        "tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1",
        "tensor_model_parallel_size=2, pipeline_model_parallel_size=4, order='tp-pp-dp'",
        "distributed_timeout_minutes=10",
    ),
    advice=_mesh_advice,
)
"""The row of ``initialize_model_parallel``."""
_KNOWN = {*INITIALIZE.signature.names, "gtp_remat_size", "expert_gtp_remat_size"}
NEWER_ARGUMENTS = frozenset(("gtp_remat_size", "expert_gtp_remat_size", "rank_offset", "local_world_size"))
"""What newer releases take besides."""

RANK_GENERATOR = Row(
    "RankGenerator(tp, ep, dp, pp, cp, order, rank_offset=0)",
    examples=("tp=2, ep=1, dp=3, pp=4, cp=1, order='tp-dp-pp'",),
    advice=_layout_advice,
)
"""The row of ``RankGenerator``."""
