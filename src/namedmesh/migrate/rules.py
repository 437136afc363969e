"""The rules of the migration: how the arguments of a legacy call determine the mesh call that replaces it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DIALECT = "namedmesh.compat.megatron.parallel_state"
"""The module that has every legacy name, whether or not a mesh call replaces it."""

_TRUE_BY_DEFAULT = ("check_initialized", "ignore_virtual")
_UNCHECKED = (
    "check_initialized=False answered None before initialization; a mesh that exists always has its axes, "
    "and an unknown axis is an AxisError"
)
_GATHERED = (
    "newer releases count the ranks of gtp_remat, and of egtp_remat for the experts, unless with_gtp_remat=False; name that "
    'axis, too, where the mesh has it, such as mesh.group("dp", "gtp_remat")'
)
# For each view: the axes that need it, and its sizes in Megatron's default order, in which pp is the slowest axis and
# tp the fastest. The variables have the names of Megatron's arguments.
_VIEWS = {
    "expert": (
        ("edp", "egtp_remat", "ep", "etp", "edp_replicate", "edp_shard"),
        "edp=-1, ep=expert_model_parallel_size, etp=expert_tensor_parallel_size",
    ),
    "expert_optimizer": (
        ("edp_replicate", "edp_shard"),
        'edp_replicate=num_distributed_optimizer_instances, edp_shard=-1, ep=mesh.size("ep"), etp=mesh.size("etp")',
    ),
    "optimizer": (
        ("dp_replicate", "dp_shard"),
        'dp_replicate=num_distributed_optimizer_instances, dp_shard=-1, tp=mesh.size("tp")',
    ),
    "gather": (("dp_cp_gather",), 'dp_cp_gather=-1, tp=mesh.size("tp")'),
    "hybrid": (("hybrid",), 'hybrid_outer=-1, hybrid={group_size}, tp=mesh.size("tp")'),
    "levels": (
        ("cp_outer", "cp_inner"),
        'dp=mesh.size("dp"), cp_outer=-1, cp_inner=hierarchical_context_parallel_sizes[0], tp=mesh.size("tp")',
    ),
}
# Sets of ranks that no axis spans: plain torch groups.
_IRREGULAR = {
    "embedding_group": '[sorted({pipe[0], pipe[-1]}) for pipe in mesh.layout.groups("pp")]',
    "position_embedding_group": '[[pipe[0]] for pipe in mesh.layout.groups("pp")]',
}
_GLOO = "namedmesh.GroupOptions(gloo_twin=True)"


def view_statement(name: str, expression: str = "") -> str:
    """Return the statement that adds a view, in Megatron's default order, for an expression that uses it.

    Example:
        >>> view_statement("gather").startswith('mesh.add_view("gather", options={"dp_cp_gather": ')
        True
    """
    options = ""
    if name == "gather":
        options = 'options={"dp_cp_gather": namedmesh.GroupOptions(share=False)}, '
    elif name == "expert_optimizer" and "gloo_group" in expression:
        options = f'options={{"edp_shard": {_GLOO}}}, '
    sizes = _VIEWS[name][1]
    if name == "expert" and "egtp_remat" in expression:
        sizes = sizes.replace(", ep=", ", egtp_remat=expert_gtp_remat_size, ep=")
    return f'mesh.add_view("{name}", {options}pp=mesh.size("pp"), {sizes})'


def setup_statements(expression: str) -> tuple[str, ...]:
    """Return the statements that every rank runs once, after the mesh is made, before it evaluates an expression.

    Returns:
        The views of the axes that the mesh itself does not have, then the groups over several axes.

    Example:
        >>> setup_statements('mesh.group("cp", "tp")'), setup_statements('mesh.size("cp", "tp")')
        (('mesh.flatten("cp", "tp")',), ())
    """
    names = set(re.findall(r"\w+", expression))
    views = [
        view_statement(view, expression) for view, (axes, _) in _VIEWS.items() if names.intersection(axes)
    ]
    irregular = [
        f"{name} = torch.distributed.new_subgroups_by_enumeration({ranks})[0]"
        for name, ranks in _IRREGULAR.items()
        if name in names
    ]
    products = re.findall(r'mesh\.(?:gloo_)?group\(("\w+"(?:, "\w+")+)\)', expression)
    return (*views, *irregular, *(f"mesh.flatten({axes})" for axes in products))


# Remarks about what stands in an expression.
_NOTES = {
    "virtual_stages": "virtual_stages is a number of your own: how many virtual stages a rank has; torch's schedules "
    "count stages, not a rank in a virtual pipeline",
    '"gtp_remat"': "an axis of the mesh where gtp_remat_size is above 1, of newer releases: init_mesh(pp=..., dp=..., cp=..., "
    "gtp_remat=..., tp=...); without it leave the name out",
    "egtp_remat": "an axis of the experts' view where expert_gtp_remat_size is above 1; without it leave the name out",
    "dp_cp_gather": "a second communicator over the ranks of dp and cp, because of share=False",
}


def _notes(expression: str) -> list[str]:
    """Return the remarks about an expression, and where its gloo group comes from, unless its view asks for it."""
    gloo = re.search(r'mesh\.gloo_group\("(?!edp_shard")(\w+)"', expression)
    notes = [note for name, note in _NOTES.items() if name in expression]
    if gloo is not None:
        options = f'options={{"{gloo[1]}": {_GLOO}}}'
        notes.append(f"a gloo group is made where it is asked for: namedmesh.init_mesh(..., {options})")
    return notes


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, by the names of the parameters.

    Args:
        named: the expression given for each parameter.
        rest: the source of ``*args`` and ``**kwargs``, whose content is not known; empty without them.

    Example:
        >>> call = ast.parse("get_data_parallel_rank(True, **more)", mode="eval").body
        >>> arguments = Arguments.of(call, ("with_context_parallel", "partial_data_parallel"))
        >>> arguments.flag("with_context_parallel"), arguments.rest
        (True, '**more')
    """

    named: Mapping[str, ast.expr] = field(default_factory=dict)
    rest: str = ""

    @classmethod
    def of(cls, call: ast.Call, parameters: Sequence[str]) -> Arguments:
        """Assign the arguments of a call to the given parameters."""
        named = {}
        rest = []
        for position, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred):
                rest.append(ast.unparse(argument))
            elif not rest and position < len(parameters):
                named[parameters[position]] = argument
        for keyword in call.keywords:
            if keyword.arg is None:
                rest.append(f"**{ast.unparse(keyword.value)}")
            else:
                named[keyword.arg] = keyword.value
        return cls(named, ", ".join(rest))

    def flag(self, name: str) -> bool | str:
        """Return whether a flag is set; the source of the expression where that is known at run time only."""
        if name not in self.named:
            return name in _TRUE_BY_DEFAULT
        value = self.named[name]
        return bool(value.value) if isinstance(value, ast.Constant) else self.source(name)

    def source(self, name: str) -> str:
        """Return the source of an argument, to be put into another expression; its name if it is not given."""
        value = self.named.get(name)
        if value is None:
            return name
        simple = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple)
        return ast.unparse(value) if isinstance(value, simple) else f"({ast.unparse(value)})"

    def size(self, name: str) -> str:
        """Return the source of a size, which is 1 if it is not given."""
        return ast.unparse(self.named[name]) if name in self.named else "1"

    def is_off(self, name: str) -> bool:
        """Return whether an argument is missing, or a literal that asks for nothing: None, False, an empty list."""
        value = self.named.get(name)
        if isinstance(value, (ast.List, ast.Tuple)):
            return not value.elts
        return value is None or (isinstance(value, ast.Constant) and not value.value)

    def is_one(self, name: str) -> bool:
        """Return whether a size is missing or the literal 1."""
        value = self.named.get(name)
        return self.is_off(name) or (isinstance(value, ast.Constant) and value.value == 1)


@dataclass(frozen=True)
class Advice:
    """The code that replaces one call.

    Args:
        replacement: a Python expression; empty where the name stays in the dialect.
        once: statements that every rank runs once, after the mesh is made, before it evaluates the expression.
        notes: remarks, one sentence each.
    """

    replacement: str
    once: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One replacement of a name, and the flags that it goes with.

    Args:
        replacement: as in :class:`Advice`, with ``{parameter}`` where the source of an argument goes.
        note: a remark.
        when: the flags that must have these values; without any, the replacement goes with every call.
    """

    replacement: str
    note: str = ""
    when: tuple[tuple[str, bool], ...] = ()

    def advice(self, arguments: Arguments) -> Advice:
        """Return the replacement, its setup and its remarks, with the arguments of a call filled in."""

        def fill(template: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda match: arguments.source(match[1]), template)

        return Advice(
            fill(self.replacement),
            tuple(map(fill, setup_statements(self.replacement))),
            (*_notes(self.replacement), *(self.note,) * bool(self.note)),
        )


@dataclass(frozen=True)
class Entry:
    """One legacy name.

    Args:
        name: the name.
        parameters: the parameters of a function, in order; None for a name that is no function.
        variants: the replacements, those with more flags first, the one for every other call last.
        examples: calls for the page; by default one for each variant.
        render: makes the advice where the arguments decide more than flags do.

    Example:
        >>> with_cp = Variant('mesh.group("dp", "cp")', when=(("with_cp", True),))
        >>> entry = Entry("get_x", ("with_cp",), (with_cp, Variant('mesh.group("dp")')))
        >>> entry.legacy
        ('get_x(with_cp=True)', 'get_x()')
        >>> call = ast.parse("get_x(with_cp=args.cp > 1)", mode="eval").body
        >>> entry.advise(Arguments.of(call, entry.parameters)).replacement
        'mesh.group("dp", "cp") if (args.cp > 1) else mesh.group("dp")'
    """

    name: str
    parameters: tuple[str, ...] | None
    variants: tuple[Variant, ...]
    examples: tuple[str, ...] = ()
    render: Callable[[Arguments], Advice] | None = None

    @property
    def legacy(self) -> tuple[str, ...]:
        """The calls that the page shows, as source text."""
        if self.parameters is None:
            return (self.name,)
        return self.examples or tuple(
            f"{self.name}({', '.join(f'{flag}={value}' for flag, value in variant.when)})"
            for variant in self.variants
        )

    def advise(self, arguments: Arguments) -> Advice:
        """Return the replacement of one call; both of two, joined by the flag, where that is known at run time only."""
        if self.render is not None:
            return self.render(arguments)
        advice = self._select(self.variants, arguments)
        notes = advice.notes
        if arguments.rest and len(self.variants) > 1:
            others = " or ".join(dict.fromkeys(variant.replacement for variant in self.variants))
            notes += (f"the flags in {arguments.rest} decide: {others}",)
        if arguments.flag("check_initialized") is not True:
            notes += (_UNCHECKED,)
        if arguments.flag("with_gtp_remat") is not False:
            notes += (_GATHERED,)
        return Advice(advice.replacement, advice.once, notes)

    def _select(self, variants: Sequence[Variant], arguments: Arguments) -> Advice:
        first, *others = variants
        conditions = []
        for name, expected in first.when:
            value = arguments.flag(name)
            if isinstance(value, str):
                conditions.append(value if expected else f"not {value}")
            elif value != expected:
                return self._select(others, arguments)
        yes = first.advice(arguments)
        if not conditions:
            return yes
        no = self._select(others, arguments)
        if yes.replacement == no.replacement:
            return no
        otherwise = f"({no.replacement})" if " if " in no.replacement else no.replacement
        return Advice(
            f"{yes.replacement} if {' and '.join(conditions)} else {otherwise}",
            tuple(dict.fromkeys(yes.once + no.once)),
            tuple(dict.fromkeys(yes.notes + no.notes)),
        )
