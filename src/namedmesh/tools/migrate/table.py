"""Calls of Megatron's, fairscale's and ezpz's groups, and equivalent calls of a mesh.

The rows are data; a test compares each of them with upstream. In a replacement, ``mesh`` is the
mesh, and ``{axes}`` are the axes that the flags of a call choose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from namedmesh.layout.axes import EXPERT_AXES
from namedmesh.layout.orders import LEGACY_APIS, GroupSpec

Arguments: TypeAlias = Sequence[tuple[str, str]]
"""The arguments of a call: the keyword, ``*``, ``**`` or nothing, and the source text."""

_EXPERT_VIEW = (
    'mesh.add_view("expert", pp=mesh.size("pp"), edp=-1, '
    "ep=expert_model_parallel_size, etp=expert_tensor_parallel_size)"
)


class Advice(NamedTuple):
    """The replacement of one use of a legacy name.

    Attributes:
        new: the expression that replaces it; empty if there is none.
        once: statements that every rank runs once before it.
        doubt: why the use is not replaced automatically; empty if it can be.
        needs_no_virtual: whether the replacement is right only without virtual pipeline stages.
        needs_groups: whether the replacement is right only after the groups were made: before, the
            legacy function returns a number, and a mesh raises an error.
    """

    new: str
    once: tuple[str, ...] = ()
    doubt: str = ""
    needs_no_virtual: bool = False
    needs_groups: bool = False


class Row(NamedTuple):
    """The replacement of one legacy name by an expression of a mesh.

    Attributes:
        new: the expression that replaces it.
        axes: the axes of the group, by the flags of the call that choose them.
        parameters: the parameters that may be given by position, in their order.
        doubt: why no use is replaced automatically; empty if some are.
    """

    new: str
    axes: dict[tuple[str, ...], tuple[str, ...]]
    parameters: tuple[str, ...] = ()
    doubt: str = ""

    def advise(self, arguments: Arguments = ()) -> Advice:
        """Return the replacement of a call with some arguments.

        Example:
            >>> MEGATRON["get_data_parallel_rank"].advise([("", "True")]).new
            'mesh.rank("dp", "cp")'
        """
        given = list_unusual_arguments(arguments, self.parameters)
        axes = self.axes.get(tuple(given))
        doubt = self.doubt
        if axes is None or {*given.values()} - {"True"}:
            # Flags that are variables: the group without flags is the best advice for a person.
            axes = self.axes[()]
            doubt = f"the value of {' and '.join(given)} decides it"
        once = []
        if {*EXPERT_AXES} & {*axes}:
            once.append(_EXPERT_VIEW)
        quoted = ", ".join(f'"{axis}"' for axis in axes)
        # Accessors never communicate, so the group of several axes has to exist before.
        if "group(" in self.new and len(axes) > 1:
            once.append(f"mesh.flatten({quoted})")
        if once and not doubt:
            doubt = "every rank has to run a statement once before"
        # Up to megatron-core 0.12 and in many vendored copies, virtual pipeline stages count unless
        # ignore_virtual=True is given; from 0.13 on it is the default.
        says_ignore = ("ignore_virtual", "True") in arguments or arguments[:1] == [("", "True")]
        needs_no_virtual = self.parameters == _STAGE and not says_ignore
        return Advice(self.new.format(axes=quoted), tuple(once), doubt, needs_no_virtual)


def list_unusual_arguments(arguments: Arguments, parameters: Sequence[str]) -> dict[str, str]:
    """Return the source of the arguments that differ from their defaults, by parameter.

    Args:
        arguments: the arguments of a call; unpacked ones have the names ``*`` and ``**``.
        parameters: the parameters that may be given by position, in their order.
    """
    found = {}
    for position, (keyword, source) in enumerate(arguments):
        name = keyword
        if not name:
            # More arguments than parameters: the call is of another release, and is reported as it
            # is.
            known = position < len(parameters)
            name = parameters[position] if known else f"argument {position + 1}"
        default = str(name in _TRUE_BY_DEFAULT)
        if source not in {"None", default}:
            found[name] = source
    return found


_CHECK = ("check_initialized",)
_WITH_CP = ("with_context_parallel",)
_STAGE = ("ignore_virtual", "vp_stage")
_TRUE_BY_DEFAULT = {"check_initialized", "ignore_virtual"}  # every other flag is False by default
_ACCESSORS = {
    "get_{}_group": ("mesh.group({axes})", _CHECK + _WITH_CP),
    "get_{}_world_size": ("mesh.size({axes})", _WITH_CP),
    "get_{}_rank": ("mesh.rank({axes})", _WITH_CP),
    "get_{}_src_rank": ("mesh.ranks({axes})[0]", _WITH_CP),
    "get_{}_ranks": ("list(mesh.ranks({axes}))", ()),
    "get_{}_global_ranks": ("list(mesh.ranks({axes}))", _CHECK),
}


def _make_rows(groups: Sequence[GroupSpec], suffix: str = "") -> dict[str, Row]:
    """Make the rows of groups: of their accessors with every flag, and of their variables."""
    rows: dict[str, Row] = {}
    for group in groups:
        # Groups of the first or the last stage follow from no axes.
        if group.members != "all":
            continue
        name, *flags = (group.name + suffix).split()
        for accessor, (new, parameters) in _ACCESSORS.items():
            row = rows.setdefault(accessor.format(name), Row(new, {}, parameters))
            row.axes[tuple(flags)] = group.axes
        rows[group.variable] = Row("mesh.group({axes})", {(): group.axes})
        if group.ranks:
            rows[group.ranks] = Row("list(mesh.ranks({axes}))", {(): group.axes})
    return rows


_NO_SP = "the mesh needs an axis sp, which Megatron's initialization does not make"
MEGATRON = _make_rows(LEGACY_APIS["megatron"].groups) | {
    "get_pipeline_model_parallel_first_rank": Row('mesh.ranks("pp")[0]', {(): ()}),
    "get_pipeline_model_parallel_last_rank": Row('mesh.ranks("pp")[-1]', {(): ()}),
    "get_pipeline_model_parallel_next_rank": Row('mesh.next("pp")', {(): ()}),
    "get_pipeline_model_parallel_prev_rank": Row('mesh.prev("pp")', {(): ()}),
    "is_pipeline_first_stage": Row('mesh.is_first("pp")', {(): ()}, _STAGE),
    "is_pipeline_last_stage": Row('mesh.is_last("pp")', {(): ()}, _STAGE),
    # Megatron-DeepSpeed has DeepSpeed's sequence parallelism.
    "get_sequence_parallel_group": Row("mesh.group({axes})", {(): ("sp",)}, doubt=_NO_SP),
    "get_sequence_parallel_world_size": Row("mesh.size({axes})", {(): ("sp",)}, doubt=_NO_SP),
    "get_sequence_parallel_rank": Row("mesh.rank({axes})", {(): ("sp",)}, doubt=_NO_SP),
}
"""The names of Megatron's ``parallel_state``. A name that is not here stays."""
MEGATRON["get_data_parallel_group"] = MEGATRON["get_data_parallel_group"]._replace(parameters=_WITH_CP)
FAIRSCALE = _make_rows(LEGACY_APIS["fairscale"].groups, "_parallel")
"""The names of fairscale's ``nn.model_parallel.initialize``."""
EZPZ = _make_rows(LEGACY_APIS["ezpz"].groups, "_parallel")
"""The names of ``ezpz.tp``."""

_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VIRTUAL = "virtual_pipeline_model_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
# The parameters that change no rank of any group, and that Megatron's `bind` takes as they are.
_BOUND = (VIRTUAL, "create_gloo_process_groups", "get_embedding_ranks", "get_position_embedding_ranks")


class LegacyApi(NamedTuple):
    """One legacy API: the modules that have its names, and its compatibility layer.

    Attributes:
        name: its name.
        modules: the modules that have its names, upstream's own first.
        rows: the replacements of its names.
        source: the end of the path of upstream's own file, by which a vendored copy is found.
        sizes: the parameters of its initialization that are sizes, by the axes of the mesh in their
            order; empty text for an axis that is inferred.
        parameters: the parameters of its initialization that may be given by position.
        answers_before: a pattern of the functions that return a number before the groups are made.
        initializer: the function that makes the groups.
    """

    name: str
    modules: tuple[str, ...]
    rows: Mapping[str, Row]
    source: str
    sizes: Mapping[str, str]
    parameters: tuple[str, ...]
    answers_before: str = ""
    initializer: str = "initialize_model_parallel"

    @property
    def layer(self) -> str:
        """The module of namedmesh with ``install()`` and ``bind()``."""
        return f"namedmesh.compat.{self.name.lower()}"


APIS = (
    LegacyApi(
        "Megatron",
        ("megatron.core.parallel_state", "megatron.core.mpu", "namedmesh.compat.megatron.parallel_state"),
        MEGATRON,
        "megatron/core/parallel_state.py",
        {"pp": _PP, "dp": "", "cp": "context_parallel_size", "tp": _TP},
        (_TP, _PP, VIRTUAL),
        # Without torch's default group Megatron returns 0 for these, so that tools run in one process.
        "get_(data|context|expert_model|expert_data|tensor_and_context|expert_tensor_and_model)_parallel_"
        "(rank|world_size)",
    ),
    LegacyApi(
        "fairscale",
        (
            "fairscale.nn.model_parallel.initialize",
            "fairscale.nn.model_parallel",
            "namedmesh.compat.fairscale",
        ),
        FAIRSCALE,
        "fairscale/nn/model_parallel/initialize.py",
        {"dp": "", "pp": "pipeline_length", "tp": "model_parallel_size_"},
        ("model_parallel_size_", "pipeline_length"),
    ),
    LegacyApi(
        "ezpz",
        ("ezpz.tp", "namedmesh.compat.ezpz.tp", "namedmesh.compat.ezpz"),
        EZPZ,
        "ezpz/tp/__init__.py",
        {
            "dp": "",
            "pp": "pipeline_parallel_size",
            "cp": "context_parallel_size",
            "tp": "tensor_parallel_size",
        },
        ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
        # A program without tensor parallelism does not initialize ezpz, which describes one rank then.
        "get_tensor_parallel_(rank|world_size|src_rank)",
        "initialize_tensor_parallel",
    ),
)
API_OF_MODULE = {module: api for api in APIS for module in api.modules}
"""The legacy API of each module that has its names."""


def initialize(module: str, arguments: Arguments) -> Advice:
    """Return the replacement of ``initialize_model_parallel``: a mesh, bound to its layer.

    This is advice for a person: ``--write`` leaves the call as it is, behind ``install()``.

    Args:
        module: the module in which the legacy function is.
        arguments: the arguments of the call.

    Example:
        >>> initialize("megatron.core.parallel_state", [("", "2"), ("", "4")]).new
        'namedmesh.compat.megatron.bind(namedmesh.init_mesh(pp=4, dp=-1, cp=1, tp=2))'
    """
    api = API_OF_MODULE[module]
    given = list_unusual_arguments(arguments, api.parameters)
    once = []
    doubts = []
    written = {}
    for axis, name in api.sizes.items():
        written[axis] = given.pop(name, "1") if name else "-1"
    # Experts are a second layout over the same ranks: a view of the mesh, not axes of it.
    if _EP in given or _ETP in given:
        ep = given.pop(_EP, "1")
        etp = given.pop(_ETP, written["tp"])
        once.append(_EXPERT_VIEW.replace(_EP, ep).replace(_ETP, etp))
        doubts.append("every rank adds the experts' view before it binds the mesh")
    mesh = f"namedmesh.init_mesh({', '.join(f'{axis}={size}' for axis, size in written.items())})"
    passed_on = [f"{name}={given.pop(name)}" for name in _BOUND if name in given]
    if given:
        doubts.append(f"{', '.join(given)} cannot be expressed by a mesh")
    new = f"{api.layer}.bind({', '.join([mesh, *passed_on])})"
    return Advice(new, tuple(once), "; ".join(doubts))


def advise(module: str, name: str, arguments: Arguments) -> Advice | None:  # noqa: PLR0911  one for each kind
    """Return the replacement of a use of a name; None if it belongs to no legacy API.

    Args:
        module: the module from which the name is imported.
        name: the name.
        arguments: the arguments, if it is called.
    """
    api = API_OF_MODULE.get(module)
    if api is None:  # perhaps re-exported by a module of the program itself, which is not followed
        if "parallel" not in name.lower():
            return None
        advices = [api.rows[name].advise(arguments) for api in APIS if name in api.rows]
        if not advices:
            return None
        meanings = list(dict.fromkeys(advice.new for advice in advices))
        if len(meanings) == 1:
            return advices[0]
        # gpt-neox, SwissArmyTransformer and metaseq have fairscale's meaning.
        megatron, fairscale = meanings
        doubt = (
            f"{module} is not followed, and the name has two meanings: {fairscale} in fairscale "
            f"and in most modules of programs, {megatron} in megatron.core; look it up, and give "
            f"--module {module}=API"
        )
        return Advice(f"{fairscale} or {megatron}", doubt=doubt)
    # A legacy name without a row is reported, too: it has to be replaced by hand, or stays.
    if name in api.rows:
        needs_groups = re.fullmatch(api.answers_before, name) is not None
        return api.rows[name].advise(arguments)._replace(needs_groups=needs_groups)
    if f"{module}.{name}" in API_OF_MODULE:
        return None
    return Advice("", doubt="it has no replacement")
