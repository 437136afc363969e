"""The legacy APIs: where the names of each are imported from, and its table."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.migrate.rules import Row
from namedmesh.migrate.table import OVERRIDE, OWN_VARIABLE, SEVERAL_MESHES, TABLE, size_and_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# In fairscale and GPT-NeoX "model parallel" is tensor parallel.
_MODEL_PARALLEL = [
    Row("get_model_parallel_group()", 'mesh.group("tp")'),
    *size_and_rank("model_parallel", '"tp"', src=True),
    Row("get_data_parallel_group()", 'mesh.group("dp")'),
    *size_and_rank("data_parallel", '"dp"'),
    Row("get_context_parallel_group()", 'mesh.group("cp")'),
    *size_and_rank("context_parallel", '"cp"'),
    Row("model_parallel_is_initialized()", "not mesh.closed", SEVERAL_MESHES),
    Row("destroy_model_parallel()", "mesh.close()", "it destroys the groups that the mesh made"),
]
FAIRSCALE: dict[str, Row] = {
    row.name: row
    for row in (
        *_MODEL_PARALLEL,
        Row(
            "initialize_model_parallel(model_parallel_size_, pipeline_length=1, *, model_parallel_backend=None, "
            "pipeline_backend=None, ddp_backend=None)",
            "namedmesh.init_mesh(dp=-1, pp=pipeline_length, cp=1, tp=model_parallel_size_)",
        ),
        Row("get_pipeline_parallel_group()", 'mesh.group("pp")'),
        Row("get_pipeline_parallel_ranks()", 'list(mesh.ranks("pp"))'),
        Row("get_model_parallel_ranks()", 'list(mesh.ranks("tp"))'),
        Row("get_data_parallel_ranks()", 'list(mesh.ranks("dp"))'),
        Row("get_context_parallel_ranks()", 'list(mesh.ranks("cp"))'),
    )
}
"""The rows of fairscale."""
GPT_NEOX: dict[str, Row] = {
    row.name: row
    for row in (
        *_MODEL_PARALLEL,
        Row(
            "initialize_model_parallel(model_parallel_size, topology=None, fp32_allreduce=False)",
            "namedmesh.init_mesh(pp=1, dp=-1, cp=1, tp=model_parallel_size)",
            "the sizes of a topology's axes pipe, data, context and model are those of pp, dp, cp and tp",
        ),
        Row("get_tensor_model_parallel_group()", 'mesh.group("tp")'),
        *size_and_rank("tensor_model_parallel", '"tp"', src=True),
        Row("get_pipe_parallel_group()", 'mesh.group("pp")'),
        *size_and_rank("pipe_parallel", '"pp"'),
        Row("get_data_parallel_src_rank()", 'mesh.ranks("dp")[0]'),
        Row("get_context_parallel_src_rank()", 'mesh.ranks("cp")[0]'),
        Row(
            "get_io_parallel_group()",
            note="the first and the last stage of rank 0's pipelines, over dp: no axis",
        ),
        Row("get_topology()", note="namedmesh.compat.deepspeed has the topology of a mesh"),
        *(
            Row(f"set_{axis}_{what}", note=OVERRIDE)
            for axis in ("model_parallel", "tensor_model_parallel")
            for what in ("rank(rank)", "world_size(size)")
        ),
        Row("get_fp32_allreduce()", note=OWN_VARIABLE),
        Row("is_unitialized()", "mesh.closed", SEVERAL_MESHES),
    )
}
"""The rows of GPT-NeoX's own ``megatron.mpu``."""


@dataclass(frozen=True, eq=False)
class Api:
    """One legacy API."""

    name: str  # its module, as the report shows it
    table: dict[str, Row]
    modules: tuple[str, ...]  # where its names can be imported from
    packages: tuple[str, ...] = ()  # those that have its names among others
    dialect: str = ""  # our module with the same names, if there is one


_DIALECT = "namedmesh.compat.megatron"
_STATE = f"{_DIALECT}.parallel_state"
_FAIRSCALE = "fairscale.nn.model_parallel"
MEGATRON = Api(
    "megatron.core.parallel_state",
    TABLE,
    ("megatron.core.parallel_state", "megatron.core.mpu"),
    dialect=_STATE,
)
GPT_NEOX_MPU = Api("megatron.mpu", GPT_NEOX, ("megatron.mpu.initialize",), ("megatron.mpu",))
APIS = (
    MEGATRON,
    Api(_STATE, TABLE, (_STATE, f"{_DIALECT}.mpu"), (_DIALECT,), _STATE),
    Api(
        f"{_FAIRSCALE}.initialize",
        FAIRSCALE,
        (f"{_FAIRSCALE}.initialize",),
        (_FAIRSCALE,),
        "namedmesh.compat.fairscale.initialize",
    ),
    GPT_NEOX_MPU,
)
"""The legacy APIs, Megatron first."""
API = {api.name: api for api in APIS}
"""The same by name."""
INITIALIZE_NAME = "initialize_model_parallel"
"""The name of the function that makes the groups, in each of them."""
API_PATHS = frozenset(path for api in APIS for path in (*api.modules, *api.packages))
"""What their names are imported from."""

_LAYERS = "megatron.core.tensor_parallel"
PROVIDED = frozenset(
    (
        *("megatron", "megatron.core", *MEGATRON.modules, _LAYERS),
        *(f"{_LAYERS}.{part}" for part in ("cross_entropy", "layers", "mappings", "utils")),
    )
)
"""What can be imported after ``install()`` where megatron-core is not installed."""
_ABSENT = frozenset(f"{_LAYERS}.{part}" for part in ("data", "random", "inference_layers"))


def needed_by(
    node: ast.Import | ast.ImportFrom, targets: Mapping[str, str]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the line of an import, and the modules of Megatron that it needs and that namedmesh does not have."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif node.level:
        return
    elif node.module == _LAYERS:  # its functions are there
        modules = [name for name in targets.values() if name in _ABSENT]
    elif node.module in {"megatron", "megatron.core"}:
        modules = [target for name, target in targets.items() if name != "*"]
    else:
        modules = [node.module or ""]
    absent = [name for name in modules if name.startswith("megatron.") and name not in PROVIDED]
    if absent:
        yield node.lineno, absent
