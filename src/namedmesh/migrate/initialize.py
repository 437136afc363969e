"""The calls that say sizes: ``initialize_model_parallel`` and ``RankGenerator``, argument by argument."""

from __future__ import annotations

import ast

from namedmesh.migrate.once import GATHER, LEVELS
from namedmesh.migrate.rules import Advice, Arguments, Entry

__all__ = ["rank_generator", "started"]

_PARAMETERS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_comm_backend",
    "use_sharp",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "hybrid_context_parallel",
    "expert_model_parallel_size",
    "num_distributed_optimizer_instances",
    "expert_tensor_parallel_size",
    "nccl_communicator_config_path",
    "distributed_timeout_minutes",
    "order",
    "get_embedding_ranks",
    "get_position_embedding_ranks",
    "create_gloo_process_groups",
    "high_priority_stream_groups",
    "sharp_enabled_group",
    "create_all_gather_group",
)
_DENSE = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
_DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_LEVELS = "hierarchical_context_parallel_sizes"
_EXAMPLES = (
    "tensor_model_parallel_size=2, pipeline_model_parallel_size=4",
    "tensor_model_parallel_size=2, context_parallel_size=2",
    "tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1",
    "tensor_model_parallel_size=2, pipeline_model_parallel_size=4, order='tp-pp-dp'",
    "distributed_timeout_minutes=10",
)

# Arguments that change nothing in the sizes: what to do about each, where it is given.
_NOTES = {
    "virtual_pipeline_model_parallel_size": "virtual stages are no axis: keep their number in a variable of your own",
    "use_sharp": "SHARP is an NCCL setting of an axis: GroupOptions(nccl={'collnet_enable': 1})",
    "hybrid_context_parallel": "each hybrid group size is a view of its own: mesh.add_view('hybrid', ...)",
    "nccl_communicator_config_path": "the keys of the NCCL file are names of axes: ep_tp is etp, ep_dp is edp",
    "get_embedding_ranks": "groups that no axis spans are made with torch.distributed.new_subgroups_by_enumeration, "
    "from mesh.layout.groups('pp')",
    "high_priority_stream_groups": "pass options={axis: GroupOptions(high_priority=True)} for each of the groups",
}
_NO_CP = "where anything asks for 'cp', name that axis too: cp=1"
_ORDER_UNKNOWN = "the order is not a literal: layouts of the mesh have no 'ep', so leave it out of the string; views follow the order"
_NOT_ADJOINING = "num_distributed_optimizer_instances cuts dp and cp together, which this order keeps apart; its groups are no view"


def started() -> Entry:
    """The entry of ``initialize_model_parallel``.

    Example:
        >>> call = ast.parse("f(2, expert_model_parallel_size=4, order='tp-ep-dp-pp')", mode="eval").body
        >>> entry = started()
        >>> advice = entry.advise(Arguments.of(call, entry.parameters))
        >>> print(advice.replacement, *advice.once, sep=chr(10))
        namedmesh.init_mesh(pp=1, dp=-1, tp=2)
        mesh.add_view("expert", pp=1, edp=-1, ep=4, etp=2)
    """
    examples = tuple(f"initialize_model_parallel({given})" for given in _EXAMPLES)
    return Entry("initialize_model_parallel", _PARAMETERS, (), examples, _init_mesh)


def rank_generator() -> Entry:
    """The entry of ``RankGenerator``.

    Example:
        >>> call = ast.parse("f(tp=2, ep=1, dp=3, pp=4, cp=1, order='tp-dp-pp')", mode="eval").body
        >>> entry = rank_generator()
        >>> entry.advise(Arguments.of(call, entry.parameters)).replacement
        "namedmesh.Layout.from_order('tp-dp-pp', tp=2, ep=1, dp=3, pp=4, cp=1)"
    """
    example = "RankGenerator(tp=2, ep=1, dp=3, pp=4, cp=1, order='tp-dp-pp')"
    parameters = ("tp", "ep", "dp", "pp", "cp", "order", "rank_offset")
    return Entry("RankGenerator", parameters, (), (example,), _from_order)


def _from_order(arguments: Arguments) -> Advice:
    sizes = [
        f"{name}={ast.unparse(given)}"
        for name, given in arguments.named.items()
        if name not in {"order", "rank_offset"}
    ]
    offset = [f"rank_offset={arguments.source('rank_offset')}"] * ("rank_offset" in arguments.named)
    said = ", ".join([arguments.source("order"), *sizes, *offset])
    return Advice(
        f"namedmesh.Layout.from_order({said})", notes=("get_ranks('tp-dp') is layout.groups('tp', 'dp')",)
    )


def _init_mesh(arguments: Arguments) -> Advice:
    order = _order(arguments)
    sizes = {axis: _size(arguments, name) for axis, name in _DENSE.items()}
    sizes["dp"] = "-1"
    if "context_parallel_size" not in arguments.named:
        del sizes["cp"]
    notes = [note for name, note in _NOTES.items() if not _off(arguments, name)]
    if "cp" not in sizes:
        notes.append(_NO_CP)
    if order is None:
        shown = ", ".join(f"{axis}={sizes[axis]}" for axis in ("tp", "cp", "pp") if axis in sizes)
        layout = f"namedmesh.Layout.from_order({arguments.source('order')}, {shown}, world_size=torch.distributed.get_world_size())"
        said = [layout]
        notes.append(_ORDER_UNKNOWN)
    else:
        said = [
            f"{axis}={sizes[axis]}"
            for axis in _slowest_first(order, ("tp", "cp", "dp", "pp"))
            if axis in sizes
        ]
    if arguments.rest:
        notes.append(f"what {arguments.rest} holds is not known here; sizes given there are missing")
    views, remarks = _views(arguments, order or _DEFAULT_ORDER, sizes)
    said += _settings(arguments)
    return Advice(f"namedmesh.init_mesh({', '.join(said)})", tuple(views), (*notes, *remarks))


def _settings(arguments: Arguments) -> list[str]:
    """Keywords of init_mesh that are no sizes."""
    said = []
    if "distributed_timeout_minutes" in arguments.named:
        minutes = _size(arguments, "distributed_timeout_minutes")
        said.append(f"timeout=datetime.timedelta(minutes={minutes})")
    backend = not _off(arguments, "pipeline_model_parallel_comm_backend")
    options = [
        f'"pp": namedmesh.GroupOptions(backend={arguments.source("pipeline_model_parallel_comm_backend")})'
    ] * backend
    if not _off(arguments, "nccl_communicator_config_path"):
        from_file = f"namedmesh.GroupOptions.from_yaml({arguments.source('nccl_communicator_config_path')})"
        said.append(f"options={{**{from_file}, {options[0]}}}" if options else f"options={from_file}")
    elif options:
        said.append(f"options={{{options[0]}}}")
    return said


def _views(arguments: Arguments, order: str, dense: dict[str, str]) -> tuple[list[str], list[str]]:
    """The views that the arguments ask for, and remarks about what no view can give."""
    experts = not (
        _one(arguments, "expert_model_parallel_size") and _off(arguments, "expert_tensor_parallel_size")
    )
    several = not _one(arguments, "num_distributed_optimizer_instances")
    views = _expert_views(arguments, order, dense, several=several) if experts else []
    remarks: list[str] = []
    if several:
        view = _optimizer_view(arguments, order, dense)
        (views if view else remarks).append(view or _NOT_ADJOINING)
    if not _off(arguments, "create_all_gather_group"):
        views.append(GATHER)
    levels = arguments.named.get("hierarchical_context_parallel_sizes")
    if isinstance(levels, (ast.List, ast.Tuple)) and levels.elts:
        views.append(LEVELS.replace(f"{_LEVELS}[0]", ast.unparse(levels.elts[0])))
    elif not _off(arguments, _LEVELS):
        views.append(LEVELS.replace(_LEVELS, arguments.source(_LEVELS)))
    return views, remarks


def _expert_views(arguments: Arguments, order: str, dense: dict[str, str], *, several: bool) -> list[str]:
    as_dense = _off(arguments, "expert_tensor_parallel_size")
    sizes = {
        "etp": dense["tp"] if as_dense else _size(arguments, "expert_tensor_parallel_size"),
        "ep": _size(arguments, "expert_model_parallel_size"),
        "edp": "-1",
        "pp": dense["pp"],
    }
    expert_order = order.replace("tp", "etp").replace("dp", "edp")
    in_order = [(axis, sizes[axis]) for axis in _slowest_first(expert_order, tuple(sizes))]
    cut = _cut(in_order, "edp", _size(arguments, "num_distributed_optimizer_instances"))
    return [_view("expert", in_order), *([_view("expert_optimizer", cut)] if several else [])]


def _optimizer_view(arguments: Arguments, order: str, dense: dict[str, str]) -> str | None:
    """The view that cuts dp and cp together; None where the order keeps the two apart."""
    axes = _slowest_first(order, ("tp", "cp", "dp", "pp"))
    if "cp" in dense and abs(axes.index("dp") - axes.index("cp")) > 1:
        return None
    in_order = [(axis, dense[axis]) for axis in axes if axis in dense and axis != "cp"]
    return _view("optimizer", _cut(in_order, "dp", _size(arguments, "num_distributed_optimizer_instances")))


def _cut(sizes: list[tuple[str, str]], axis: str, instances: str) -> list[tuple[str, str]]:
    """The axes with one of them cut into instances and what is left."""
    place = [name for name, _ in sizes].index(axis)
    parts = [(f"{axis}_replicate", instances), (f"{axis}_shard", "-1")]
    return [*sizes[:place], *parts, *sizes[place + 1 :]]


def _view(name: str, sizes: list[tuple[str, str]]) -> str:
    return f'mesh.add_view("{name}", {", ".join(f"{axis}={size}" for axis, size in sizes)})'


def _order(arguments: Arguments) -> str | None:
    """The order string; None where it is not a literal."""
    given = arguments.named.get("order")
    if given is None:
        return _DEFAULT_ORDER
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        return given.value.lower()
    return None


def _slowest_first(order: str, axes: tuple[str, ...]) -> list[str]:
    """The axes as ``init_mesh`` takes them; what the order leaves out has size 1 and comes first."""
    named = [axis for axis in order.split("-") if axis in axes]
    return [*(axis for axis in axes if axis not in named), *reversed(named)]


def _size(arguments: Arguments, name: str) -> str:
    given = arguments.named.get(name)
    return "1" if given is None else ast.unparse(given)


def _off(arguments: Arguments, name: str) -> bool:
    """Whether an argument is missing, or a literal that asks for nothing: None, False, an empty list."""
    given = arguments.named.get(name)
    if isinstance(given, (ast.List, ast.Tuple)):
        return not given.elts
    return given is None or (isinstance(given, ast.Constant) and not given.value)


def _one(arguments: Arguments, name: str) -> bool:
    """Whether a size is missing or the literal 1."""
    given = arguments.named.get(name)
    return _off(arguments, name) or (isinstance(given, ast.Constant) and given.value == 1)
