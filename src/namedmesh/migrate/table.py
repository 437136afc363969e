"""The migration table: every name of Megatron's ``parallel_state``, and the mesh call that replaces it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from namedmesh.dialects import DIALECTS
from namedmesh.migrate.initialize import INITIALIZE, RANK_GENERATOR
from namedmesh.migrate.rules import DIALECT, Advice, Arguments, Entry, Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SECTIONS", "TABLE", "advise", "page", "rows"]

_CP = "with_context_parallel"
_EXPERT_PART = "partial_expert_data_parallel"
_LEVELS = '[mesh.group("cp_inner"), mesh.group("cp_outer")]'
_HYBRID = '{mesh.size("hybrid"): mesh.group("hybrid")}'

_DEPRECATED = "deprecated in Megatron too"
_SEVERAL_MESHES = (
    "several meshes can be alive; code that was given none asks namedmesh.current_mesh(), which raises MeshError "
    "where there is none"
)
_VIRTUAL = (
    "virtual_stages is a number of your own: how many virtual stages a rank has; torch's schedules count stages, not "
    "a rank in a virtual pipeline"
)
_OWN_VARIABLE = "keep the number in a variable of your own"
_OWN_STAGE = f"{_OWN_VARIABLE} and pass it to what needs it"
_OVERRIDE = (
    "it overrides an answer and makes no group: make a second mesh of the sizes wanted (over part of the world with "
    "part=True) and select it with 'with mesh:'"
)
_OVERRIDDEN = (
    "an override that set_... assigns, None otherwise; what it overrides is mesh.rank(...) or mesh.size(...)"
)
_BUFFER = "torch.empty(shape, dtype=dtype, device=mesh.device) does the same: torch's allocator hands freed memory out again"
_SYMMETRIC = "it wraps torch's symmetric memory, over mesh.group('tp')"
_BUFFER_VARIABLE = "torch.empty(...): torch's allocator hands freed memory out again"
_NONE_ELSEWHERE = "Megatron has None on the other ranks"


def _axes_by_group() -> dict[str, dict[str, str]]:
    """For each group of Megatron, and each set of flags of its getter, the axes as source text."""
    axes: dict[str, dict[str, str]] = {
        "data_parallel": {f"{_CP} partial_data_parallel": '"dp_shard"'},
        "expert_data_parallel": {_EXPERT_PART: '"edp_shard"'},
    }
    for kind in DIALECTS["megatron"].kinds:
        name, _, flags = kind.name.partition(" ")
        axes.setdefault(name, {})[flags] = ", ".join(f'"{axis}"' for axis in kind.axes)
    # One optimizer instance of several has a part of the experts' replicas.
    axes["intra_distributed_optimizer_instance"] = {"": '"pp", "edp_shard", "ep", "etp"'}
    axes["inter_distributed_optimizer_instance"] = {"": '"edp_replicate"'}
    return axes


_AXES = _axes_by_group()


def _entry(signature: str, *variants: Variant | str, note: str = "", example: str = "") -> Entry:
    """The entry of ``name(required[, optional])``, or of a name that is no function.

    Args:
        signature: the name, with the parameters of a function.
        variants: the replacements, those with more flags first; an empty one stays in the dialect.
        note: a remark about those that are plain text.
        example: the call that the page shows, if it is not the one with the required arguments.
    """
    name, call, parameters = signature.partition("(")
    required = parameters.partition("[")[0].rstrip(", )")
    if required and not example:
        example = f"{name}({required})"
    return Entry(
        name,
        tuple(re.findall(r"\w+", parameters)) if call else None,
        tuple(Variant(variant, note) if isinstance(variant, str) else variant for variant in variants),
        (example,) * bool(example),
    )


def _when(flags: str, replacement: str, note: str = "") -> Variant:
    """A replacement that goes with some flags."""
    return Variant(replacement, note, tuple((flag, True) for flag in flags.split()))


def _over(group: str, expression: str, note: str = "") -> list[Variant]:
    """An expression over the axes of a group, for each set of flags that its getter takes."""
    return [_when(flags, expression.format(axes), note) for flags, axes in _AXES[group].items()]


def _getter(signature: str, group: str, expression: str, note: str = "") -> Entry:
    """The entry of a function that returns an expression over the axes of a group."""
    return _entry(signature, *_over(group, expression, note))


def _group(group: str) -> Entry:
    return _getter(f"get_{group}_group([check_initialized])", group, "mesh.group({})")


def _size_and_rank(group: str, parameters: str = "") -> tuple[Entry, Entry]:
    return (
        _getter(f"get_{group}_world_size([{parameters}])", group, "mesh.size({})"),
        _getter(f"get_{group}_rank([{parameters}])", group, "mesh.rank({})"),
    )


def _stage(name: str, virtual: str, plain: str) -> Entry:
    note = _VIRTUAL if "virtual_stages" in virtual else ""
    first = Variant(virtual, note, (("ignore_virtual", False),))
    examples = f"{name}(ignore_virtual=False, vp_stage=stage)", f"{name}()"
    return Entry(name, ("ignore_virtual", "vp_stage"), (first, Variant(plain)), examples)


_OVERRIDABLE = (
    *("data_parallel", "tensor_model_parallel", "pipeline_model_parallel"),
    *("expert_model_parallel", "expert_tensor_parallel"),
)
_dp_shard_group, *_dp_groups = _over("data_parallel", "mesh.group({})")

SECTIONS: dict[str, tuple[Entry, ...]] = {
    "Making and closing": (
        INITIALIZE,
        _entry("is_initialized()", "not mesh.closed", note=_SEVERAL_MESHES),
        _entry("is_unitialized()", "mesh.closed", note=_DEPRECATED),
        _entry("model_parallel_is_initialized()", "not mesh.closed", note=_SEVERAL_MESHES),
        _entry(
            "destroy_model_parallel()",
            "mesh.close()",
            note="it destroys the groups that the mesh made, where Megatron only forgets them",
        ),
    ),
    "Groups": (
        _group("tensor_model_parallel"),
        _group("pipeline_model_parallel"),
        _group("context_parallel"),
        _entry(
            f"get_data_parallel_group([{_CP}, partial_data_parallel, independent_all_gather])",
            _dp_shard_group,
            _when(
                f"{_CP} independent_all_gather",
                'mesh.group("dp_cp_gather")',
                "a second communicator over the ranks of dp and cp, because of share=False",
            ),
            *_dp_groups,
        ),
        _getter(
            f"get_data_parallel_group_gloo([{_CP}, partial_data_parallel])",
            "data_parallel",
            "mesh.gloo_group({})",
        ),
        _entry(
            "has_separate_all_gather_group()",
            '"gather" in mesh.views',
            note="the view is the one that independent_all_gather=True goes with",
        ),
        _group("model_parallel"),
        _getter(
            f"get_tensor_and_data_parallel_group([check_initialized, {_CP}])",
            "tensor_and_data_parallel",
            "mesh.group({})",
        ),
        _group("tensor_and_context_parallel"),
        _entry(
            f"get_amax_reduction_group([{_CP}, tp_only_amax_red])",
            _when(f"{_CP} tp_only_amax_red", 'mesh.group("cp", "tp")'),
            _when(_CP, 'mesh.group("dp", "cp", "tp")'),
            _when("tp_only_amax_red", 'mesh.group("tp")'),
            'mesh.group("dp", "tp")',
        ),
        _entry("get_hierarchical_context_parallel_groups([check_initialized])", _LEVELS),
        _entry(
            "get_hybrid_data_context_parallel_groups([check_initialized, group_size])",
            'mesh.group("hybrid")',
            note="one view, with names of its own, for each group_size; as large as dp and cp together it is "
            'mesh.group("dp", "cp")',
            example="get_hybrid_data_context_parallel_groups(group_size=group_size)",
        ),
        _entry("get_embedding_group([check_initialized])", "embedding_group"),
        _entry("get_position_embedding_group([check_initialized])", "position_embedding_group"),
    ),
    "Sizes and ranks": (
        *_size_and_rank("tensor_model_parallel"),
        *_size_and_rank("pipeline_model_parallel"),
        *_size_and_rank("context_parallel"),
        *_size_and_rank("data_parallel", f"{_CP}, partial_data_parallel"),
        *_size_and_rank("tensor_and_context_parallel"),
        _getter("get_tensor_model_parallel_src_rank()", "tensor_model_parallel", "mesh.ranks({})[0]"),
        _getter("get_model_parallel_src_rank()", "model_parallel", "mesh.ranks({})[0]"),
        _entry(f"get_data_parallel_src_rank([{_CP}])", *_over("data_parallel", "mesh.ranks({})[0]")[1:]),
        _entry("get_context_parallel_global_ranks([check_initialized])", 'list(mesh.ranks("cp"))'),
        _entry("get_pipeline_model_parallel_first_rank()", 'mesh.ranks("pp")[0]'),
        _entry("get_pipeline_model_parallel_last_rank()", 'mesh.ranks("pp")[-1]'),
        _entry("get_pipeline_model_parallel_next_rank()", 'mesh.next("pp")'),
        _entry("get_pipeline_model_parallel_prev_rank()", 'mesh.prev("pp")'),
        _entry(
            "get_all_ranks()",
            '"_".join(str(mesh.rank(axis)) for axis in ("tp", "dp", "cp", "pp", "ep"))',
            note="mesh.coords has the same by name",
        ),
    ),
    "Stages": (
        _stage("is_pipeline_first_stage", 'mesh.is_first("pp") and {vp_stage} == 0', 'mesh.is_first("pp")'),
        _stage(
            "is_pipeline_last_stage",
            'mesh.is_last("pp") and {vp_stage} == virtual_stages - 1',
            'mesh.is_last("pp")',
        ),
        _stage(
            "is_rank_in_embedding_group",
            '(mesh.is_first("pp") and {vp_stage} == 0) or (mesh.is_last("pp") and {vp_stage} == virtual_stages - 1)',
            'mesh.is_first("pp") or mesh.is_last("pp")',
        ),
        _entry("is_rank_in_position_embedding_group()", 'mesh.is_first("pp")'),
        _entry("default_embedding_ranks(pp_ranks)", 'sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]})'),
        _entry("default_position_embedding_ranks(pp_ranks)", '[mesh.ranks("pp")[0]]'),
        _entry("get_virtual_pipeline_model_parallel_rank()", "", note=_OWN_STAGE),
        _entry("get_virtual_pipeline_model_parallel_world_size()", "", note=_OWN_STAGE),
    ),
    "Experts": (
        _group("expert_model_parallel"),
        _group("expert_tensor_parallel"),
        _group("expert_tensor_and_model_parallel"),
        _group("expert_tensor_model_pipeline_parallel"),
        _getter(
            f"get_expert_data_parallel_group([check_initialized, {_EXPERT_PART}])",
            "expert_data_parallel",
            "mesh.group({})",
        ),
        _getter(
            f"get_data_modulo_expert_parallel_group([{_EXPERT_PART}])",
            "expert_data_parallel",
            "mesh.group({})",
            _DEPRECATED,
        ),
        _getter(
            f"get_expert_data_parallel_group_gloo([{_EXPERT_PART}])",
            "expert_data_parallel",
            "mesh.gloo_group({})",
        ),
        _group("intra_distributed_optimizer_instance"),
        _group("inter_distributed_optimizer_instance"),
        *_size_and_rank("expert_model_parallel"),
        *_size_and_rank("expert_tensor_parallel"),
        *_size_and_rank("expert_tensor_and_model_parallel"),
        *_size_and_rank("expert_data_parallel", _EXPERT_PART),
        _getter("get_expert_model_parallel_src_rank()", "expert_model_parallel", "mesh.ranks({})[0]"),
    ),
    "Making groups by hand": (
        RANK_GENERATOR,
        _entry(
            "generate_masked_orthogonal_rank_groups(world_size, parallel_size, mask)",
            'namedmesh.Layout.from_order("tp-dp-pp", tp=2, dp=3, pp=4).groups("dp")',
            note="names in place of the mask; like parallel_size, the order string has the fastest axis first",
            example="generate_masked_orthogonal_rank_groups(24, [2, 3, 4], [False, True, False])",
        ),
        _entry(
            "create_group(ranks[, timeout, backend, pg_options, use_local_synchronization, group_desc])",
            "torch.distributed.new_group({ranks})",
            note="torch's function takes the same keywords; ranks that are a product of axes need no new group: "
            "mesh.flatten(...) or mesh.add_view(...)",
        ),
        _entry(
            "create_hierarchical_groups(rank, ranks, hierarchical_group_sizes[, create_gloo_process_groups, "
            "pg_options, timeout, group_desc])",
            _LEVELS,
            note="one axis of a view for each level, the first level innermost",
        ),
        _entry(
            "create_hybrid_dp_cp_groups(rank, ranks, pg_options)",
            _HYBRID,
            note="a view for each size that is used",
        ),
        _entry(
            "get_nccl_options(pg_name, nccl_comm_cfgs)",
            "namedmesh.GroupOptions.from_yaml(nccl_communicator_config_path)",
            note="options by axis, for options= of init_mesh and add_view; the keys of the file are axes: ep_tp is etp, "
            "ep_dp is edp, mp is pp_tp, tp_dp is dp_tp, tp_cp is cp_tp, tp_dp_cp is dp_cp_tp",
        ),
        _entry(
            "overwrite_nccl_comm_cfgs(nccl_comm_cfgs, pg_name, key_value_pair)",
            "namedmesh.GroupOptions(high_priority=True)",
            note='set what the pair sets, and pass it as options={"tp": ...}, under the name of the axis',
            example="overwrite_nccl_comm_cfgs(nccl_comm_cfgs, 'tp', ('is_high_priority_stream', True))",
        ),
        _entry(
            "update_pg_timeout(timeout[, pg])",
            "namedmesh.GroupOptions(timeout={timeout})",
            note="a group is given its timeout when it is made: timeout= or options= of init_mesh; to change it on "
            f"live groups, stay with {DIALECT}",
        ),
        _entry("logger", 'logging.getLogger("namedmesh")'),
    ),
    "What stays": (
        *(
            _entry(f"set_{axis}_{answer}({answer})", "", note=_OVERRIDE)
            for answer in ("rank", "world_size")
            for axis in _OVERRIDABLE
            if (axis, answer) != ("data_parallel", "world_size")
        ),
        _entry("set_virtual_pipeline_model_parallel_rank(rank)", "", note=_OWN_STAGE),
        _entry("set_virtual_pipeline_model_parallel_world_size(world_size)", "", note=_OWN_STAGE),
        _entry("get_global_memory_buffer()", "", note=_BUFFER),
        _entry("destroy_global_memory_buffer()", "", note=_BUFFER),
        _entry("get_global_symmetric_memory_buffer()", "", note=_SYMMETRIC),
        _entry("destroy_global_symmetric_memory_buffer()", "", note=_SYMMETRIC),
    ),
}
"""The entries, by the sections of the page."""

# The variables that hold what a getter returns.
_READ_AS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "get_tensor_model_parallel_group",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "get_pipeline_model_parallel_group",
    "_CONTEXT_PARALLEL_GROUP": "get_context_parallel_group",
    "_DATA_PARALLEL_GROUP": "get_data_parallel_group",
    "_DATA_PARALLEL_GROUP_WITH_CP": f"get_data_parallel_group {_CP}",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": f"get_data_parallel_group {_CP} independent_all_gather",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": f"get_data_parallel_group {_CP} partial_data_parallel",
    "_DATA_PARALLEL_GROUP_GLOO": "get_data_parallel_group_gloo",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": f"get_data_parallel_group_gloo {_CP}",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": f"get_data_parallel_group_gloo {_CP} partial_data_parallel",
    "_MODEL_PARALLEL_GROUP": "get_model_parallel_group",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "get_tensor_and_data_parallel_group",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": f"get_tensor_and_data_parallel_group {_CP}",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "get_tensor_and_context_parallel_group",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "get_hierarchical_context_parallel_groups",
    "_HYBRID_DP_CP_GROUPS": "create_hybrid_dp_cp_groups",
    "_EMBEDDING_GROUP": "get_embedding_group",
    "_POSITION_EMBEDDING_GROUP": "get_position_embedding_group",
    "_EXPERT_MODEL_PARALLEL_GROUP": "get_expert_model_parallel_group",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "get_expert_tensor_parallel_group",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "get_expert_tensor_and_model_parallel_group",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "get_expert_tensor_model_pipeline_parallel_group",
    "_EXPERT_DATA_PARALLEL_GROUP": "get_expert_data_parallel_group",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "get_expert_data_parallel_group_gloo",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": f"get_expert_data_parallel_group {_EXPERT_PART}",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": f"get_expert_data_parallel_group_gloo {_EXPERT_PART}",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "get_inter_distributed_optimizer_instance_group",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "get_intra_distributed_optimizer_instance_group",
}

TABLE: dict[str, Entry] = {entry.name: entry for entries in SECTIONS.values() for entry in entries}
"""The entries, by legacy name."""


def _variable(name: str, getter: str) -> Entry:
    function, *flags = getter.split()
    return next(
        Entry(name, None, (Variant(variant.replacement),))
        for variant in TABLE[function].variants
        if {flag for flag, _ in variant.when} == set(flags)
    )


SECTIONS["Private names, when they are read"] = (
    *(_variable(name, getter) for name, getter in _READ_AS.items()),
    _entry("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("tp"))'),
    _entry("_PIPELINE_GLOBAL_RANKS", 'list(mesh.ranks("pp"))'),
    _entry("_CONTEXT_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("cp"))'),
    _entry("_DATA_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("dp"))'),
    _entry("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", 'list(mesh.ranks("dp", "cp"))'),
    _entry("_MODEL_PARALLEL_GLOBAL_RANKS", 'list(mesh.ranks("pp", "tp"))'),
    _entry("_EXPERT_MODEL_PARALLEL_RANKS", 'list(mesh.ranks("ep"))'),
    _entry(
        "_EMBEDDING_GLOBAL_RANKS",
        'sorted({mesh.ranks("pp")[0], mesh.ranks("pp")[-1]})',
        note=_NONE_ELSEWHERE,
    ),
    _entry("_POSITION_EMBEDDING_GLOBAL_RANKS", '[mesh.ranks("pp")[0]]', note=_NONE_ELSEWHERE),
    _entry("_global_process_group_list", "[held.group for held in mesh.communicators]"),
    *(
        _entry(f"_MPU_{axis.upper()}_{answer}", "", note=_OVERRIDDEN)
        for axis in _OVERRIDABLE
        for answer in ("RANK", "WORLD_SIZE")
    ),
    _entry("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", "", note=_OWN_VARIABLE),
    _entry("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", "", note=_OWN_VARIABLE),
    _entry("_GLOBAL_MEMORY_BUFFER", "", note=_BUFFER_VARIABLE),
    _entry("_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "", note=_BUFFER_VARIABLE),
    _entry("_set_global_memory_buffer()", "", note=_BUFFER_VARIABLE),
    _entry("_set_global_symmetric_memory_buffer()", "", note=_BUFFER_VARIABLE),
)
TABLE |= {entry.name: entry for entry in SECTIONS["Private names, when they are read"]}

_WIDTH = 56  # of the left column; a longer call has a line of its own


def advise(legacy: str) -> Advice:
    """What replaces a legacy call or name, given as source text.

    Raises:
        KeyError: the name is not in the table.

    Example:
        >>> advise("get_data_parallel_world_size(with_context_parallel=True)").replacement
        'mesh.size("dp", "cp")'
    """
    node = ast.parse(legacy, mode="eval").body
    if not isinstance(node, ast.Call):
        return TABLE[ast.unparse(node)].advise(Arguments())
    entry = TABLE[ast.unparse(node.func)]
    return entry.advise(Arguments.of(node, entry.parameters or ()))


def rows(section: str) -> Iterator[tuple[str, Advice]]:
    """Each legacy call of a section, as the page shows it, and its advice.

    Example:
        >>> next((legacy, advice.replacement) for legacy, advice in rows("Groups"))
        ('get_tensor_model_parallel_group()', 'mesh.group("tp")')
    """
    for entry in SECTIONS[section]:
        for legacy in entry.legacy:
            yield legacy, advise(legacy)


def page() -> str:
    """The table as the migration page shows it: a line for each call, and numbered remarks below.

    Example:
        >>> "get_pipeline_model_parallel_next_rank()" in page()
        True
    """
    remarks: dict[str, int] = {}
    blocks = ["\n".join([section, "-" * len(section), "", *_lines(section, remarks)]) for section in SECTIONS]
    numbered = [f"[{number}] {remark}" for remark, number in remarks.items()]
    return "\n\n".join([*blocks, "\n".join(["Remarks", "-------", "", *numbered])]) + "\n"


def _lines(section: str, remarks: dict[str, int]) -> Iterator[str]:
    for legacy, advice in rows(section):
        notes = [f"once: {statement}" for statement in advice.once] + list(advice.notes)
        marks = "".join(f" [{remarks.setdefault(note, len(remarks) + 1)}]" for note in notes)
        call = f"    {legacy:<{_WIDTH}}"
        if len(legacy) > _WIDTH:
            yield call
            call = " " * (_WIDTH + 4)
        yield f"{call}  {advice.replacement or 'stays'}{marks}"
