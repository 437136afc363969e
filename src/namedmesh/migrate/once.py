"""Statements that every rank runs once, after the mesh is made, so that later calls are look-ups.

They are written for Megatron's default order, in which ``pp`` is the slowest axis and ``tp`` the fastest. The
variables in them have the names of Megatron's arguments.
"""

from __future__ import annotations

__all__ = [
    "EMBEDDING",
    "EXPERT",
    "EXPERT_OPTIMIZER",
    "EXPERT_OPTIMIZER_TWIN",
    "GATHER",
    "HYBRID",
    "LEVELS",
    "OPTIMIZER",
    "POSITION_EMBEDDING",
    "flatten",
    "quoted",
    "twin_note",
]


def quoted(*axes: str) -> str:
    """Axes as they stand in a call.

    Example:
        >>> print(quoted("dp", "cp"))
        "dp", "cp"
    """
    return ", ".join(f'"{axis}"' for axis in axes)


def flatten(*axes: str) -> str:
    """The statement that makes the group over several axes.

    Example:
        >>> flatten("dp", "cp")
        'mesh.flatten("dp", "cp")'
    """
    return f"mesh.flatten({quoted(*axes)})"


def twin_note(axis: str) -> str:
    """Where the gloo group of an axis comes from.

    Example:
        >>> twin_note("dp").endswith('options={"dp": namedmesh.GroupOptions(gloo_twin=True)})')
        True
    """
    return (
        "a gloo group is made where it is asked for: "
        f'namedmesh.init_mesh(..., options={{"{axis}": namedmesh.GroupOptions(gloo_twin=True)}})'
    )


def _view(name: str, sizes: str, twin: str = "") -> str:
    options = f'options={{"{twin}": namedmesh.GroupOptions(gloo_twin=True)}}, ' * bool(twin)
    return f'mesh.add_view("{name}", {options}pp=mesh.size("pp"), {sizes})'


_EXPERT_SIZES = "edp=-1, ep=expert_model_parallel_size, etp=expert_tensor_parallel_size"
_OPTIMIZER_SIZES = 'dp_replicate=num_distributed_optimizer_instances, dp_shard=-1, tp=mesh.size("tp")'
_EXPERT_OPTIMIZER_SIZES = (
    "edp_replicate=num_distributed_optimizer_instances, edp_shard=-1, "
    'ep=mesh.size("ep"), etp=mesh.size("etp")'
)

EXPERT = _view("expert", _EXPERT_SIZES)
OPTIMIZER = _view("optimizer", _OPTIMIZER_SIZES)
EXPERT_OPTIMIZER = _view("expert_optimizer", _EXPERT_OPTIMIZER_SIZES)
EXPERT_OPTIMIZER_TWIN = _view("expert_optimizer", _EXPERT_OPTIMIZER_SIZES, twin="edp_shard")
HYBRID = _view("hybrid", 'hybrid_outer=-1, hybrid=group_size, tp=mesh.size("tp")')
LEVELS = _view(
    "levels",
    'dp=mesh.size("dp"), cp_outer=-1, cp_inner=hierarchical_context_parallel_sizes[0], tp=mesh.size("tp")',
)
GATHER = (
    'mesh.add_view("gather", options={"dp_cp_gather": namedmesh.GroupOptions(share=False)}, '
    'pp=mesh.size("pp"), dp_cp_gather=-1, tp=mesh.size("tp"))'
)
# Irregular sets of ranks: no axis, so plain torch groups.
EMBEDDING = (
    "embedding_group = torch.distributed.new_subgroups_by_enumeration("
    '[sorted({pipe[0], pipe[-1]}) for pipe in mesh.layout.groups("pp")])[0]'
)
POSITION_EMBEDDING = (
    "position_embedding_group = torch.distributed.new_subgroups_by_enumeration("
    '[[pipe[0]] for pipe in mesh.layout.groups("pp")])[0]'
)
