"""The rules of the migration: how the arguments of a legacy call determine the mesh call that replaces it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_UNCHECKED = (
    "check_initialized=False answered None before initialization; a mesh that exists always has its axes, "
    "and an unknown axis is an AxisError"
)
_GATHERED = (
    "newer releases count the ranks of gtp_remat, and of egtp_remat for the experts, unless with_gtp_remat=False; name that "
    'axis, too, where the mesh has it, such as mesh.group("dp", "gtp_remat")'
)
_GLOO = "namedmesh.GroupOptions(gloo_twin=True)"
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
    "hybrid": (("hybrid",), 'hybrid_outer=-1, hybrid=group_size, tp=mesh.size("tp")'),
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
# Remarks about what stands in an expression.
_NOTES = {
    "virtual_stages": "virtual_stages is a number of your own: how many virtual stages a rank has; torch's schedules "
    "count stages, not a rank in a virtual pipeline",
    '"gtp_remat"': "an axis of the mesh where gtp_remat_size is above 1, of newer releases: init_mesh(pp=..., dp=..., cp=..., "
    "gtp_remat=..., tp=...); without it leave the name out",
    "egtp_remat": "an axis of the experts' view where expert_gtp_remat_size is above 1; without it leave the name out",
    "dp_cp_gather": "a second communicator over the ranks of dp and cp, because of share=False",
    '"sp"': "an axis of the mesh where sequence_parallel_size is above 1, of Megatron-DeepSpeed: init_mesh(pp=..., dp=..., "
    "sp=...)",
}


def view_statement(name: str, expression: str = "") -> str:
    """Return the statement that adds a view, in Megatron's default order, for an expression that uses it."""
    options = ""
    if name == "gather":
        options = 'options={"dp_cp_gather": namedmesh.GroupOptions(share=False)}, '
    elif name == "expert_optimizer" and "gloo_group" in expression:
        options = f'options={{"edp_shard": {_GLOO}}}, '
    sizes = _VIEWS[name][1]
    if name == "expert" and "egtp_remat" in expression:
        sizes = sizes.replace(", ep=", ", egtp_remat=expert_gtp_remat_size, ep=")
    return f'mesh.add_view("{name}", {options}pp=mesh.size("pp"), {sizes})'


def axes_of(expression: str) -> set[str]:
    """Return the words in quotation marks in an expression of the table: the axes that it names."""
    return set(re.findall(r'"(\w+)"', expression))


def setup_statements(expression: str) -> list[str]:
    """Return the statements that every rank runs once before an expression: views of axes that the mesh lacks, then groups."""
    axes = axes_of(expression)
    statements = [view_statement(view, expression) for view, (own, _) in _VIEWS.items() if axes & {*own}]
    for name, ranks in _IRREGULAR.items():
        if re.search(rf"\b{name}\b", expression):
            statements.append(f"{name} = torch.distributed.new_subgroups_by_enumeration({ranks})[0]")
    products = re.findall(r'mesh\.(?:gloo_)?group\(("\w+"(?:, "\w+")+)\)', expression)
    return [*statements, *(f"mesh.flatten({axes})" for axes in products)]


def _notes(expression: str) -> list[str]:
    """Return the remarks about an expression, and where its gloo group comes from, unless its view asks for it."""
    notes = [note for name, note in _NOTES.items() if name in expression]
    gloo = re.search(r'mesh\.gloo_group\("(?!edp_shard")(\w+)"', expression)
    if gloo is not None:
        options = f'options={{"{gloo[1]}": {_GLOO}}}'
        notes.append(f"a gloo group is made where it is asked for: namedmesh.init_mesh(..., {options})")
    return notes


@dataclass(frozen=True)
class Signature:
    """The parameters of a function."""

    names: tuple[str, ...]
    defaults: Mapping[str, str]  # the source of the default of each that has one

    @classmethod
    def read(cls, source: str) -> Signature:
        """Read a function's name with its parameters in brackets."""
        function = cast("ast.FunctionDef", ast.parse(f"def {source}: ...").body[0])
        return cls.of(function.args)

    @classmethod
    def of(cls, given: ast.arguments) -> Signature:
        """Return the parameters of a function that was parsed."""
        positional = [*given.posonlyargs, *given.args]
        first = len(positional) - len(given.defaults)
        pairs = [*zip(positional[first:], given.defaults, strict=True)]
        pairs += [
            (one, default)
            for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
            if default
        ]
        return cls(
            tuple(one.arg for one in (*positional, *given.kwonlyargs)),
            {one.arg: ast.unparse(default) for one, default in pairs},
        )


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, by the names of the parameters."""

    named: Mapping[str, ast.expr] = field(default_factory=dict)
    rest: str = ""  # the source of ``*args`` and ``**kwargs``, whose content is not known

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
class Row:
    """One legacy name, and what replaces it; both are Python.

    Args:
        legacy: a function with its parameters and their defaults, or a variable.
        replacement: an expression over the parameters; empty where nothing on a mesh replaces the name. An argument
            of the call takes the place of its parameter, and decides the conditions that it is in.
        note: a remark.
        examples: calls for the page; by default one for each outcome of the conditions.
        advice: makes the advice where an expression does not say enough.

    Example:
        >>> row = Row("get_x(with_cp=False)", 'mesh.group("dp", "cp") if with_cp else mesh.group("dp")')
        >>> row.calls()
        ['get_x(with_cp=True)', 'get_x()']
        >>> call = ast.parse("get_x(with_cp=args.cp > 1)", mode="eval").body
        >>> row.advise(call).replacement
        'mesh.group("dp", "cp") if (args.cp > 1) else mesh.group("dp")'
    """

    legacy: str
    replacement: str = ""
    note: str = ""
    examples: tuple[str, ...] = ()
    advice: Callable[[Arguments], Advice] | None = None

    @property
    def name(self) -> str:
        """The name, without parameters."""
        return self.legacy.partition("(")[0]

    @property
    def is_function(self) -> bool:
        """Whether the name is a function's."""
        return "(" in self.legacy

    @property
    def signature(self) -> Signature:
        """The parameters of a function; none of a variable."""
        return Signature.read(self.legacy) if self.is_function else Signature((), {})

    def calls(self) -> list[str]:
        """Return the calls that the page shows, as source text."""
        if not self.is_function:
            return [self.name]
        if self.examples:
            return [f"{self.name}({given})" for given in self.examples]
        signature = self.signature
        required = [name for name in signature.names if name not in signature.defaults]
        flags = [", ".join(required)]
        if " if " in self.replacement:
            flags = [
                ", ".join(f"{name}=True" for name in names) for names in _outcomes(_parsed(self.replacement))
            ]
        return [f"{self.name}({given})" for given in flags]

    def advise(self, call: ast.expr | None = None, signature: Signature | None = None) -> Advice:
        """Return the replacement of one call, or of the name by itself; with the parameters that the code itself gives the function."""
        signature = signature or self.signature
        arguments = Arguments.of(call, signature.names) if isinstance(call, ast.Call) else Arguments()
        if self.advice is not None:
            return self.advice(arguments)
        values = {name: default for name, default in signature.defaults.items() if default != "None"}
        values |= {name: arguments.source(name) for name in arguments.named}
        leaves: list[str] = []
        replacement = _filled(self.replacement, _parsed(self.replacement), values, leaves)
        once = [_filled(one, _parsed(one), values, []) for leaf in leaves for one in setup_statements(leaf)]
        notes = [note for leaf in leaves for note in _notes(leaf)]
        if self.note:
            notes.append(self.note)
        nodes = [node for leaf in leaves for node in ast.walk(_parsed(leaf))]
        open_ones = {node.id: None for node in nodes if isinstance(node, ast.Name) and node.id not in values}
        notes += [
            f"the call gives no {name}: put in a value of your own"
            for name in open_ones
            if name in self.signature.names
        ]
        if arguments.rest and " if " in self.replacement:
            notes.append(f"the flags in {arguments.rest} decide: {self.replacement}")
        notes += self._about(arguments)
        return Advice(replacement, tuple(dict.fromkeys(once)), tuple(dict.fromkeys(notes)))

    def _about(self, arguments: Arguments) -> Iterator[str]:
        """Yield the remarks about arguments that the expression does not take up."""
        if arguments.named.get("check_initialized") and arguments.source("check_initialized") != "True":
            yield _UNCHECKED
        for name in arguments.named:
            if name == "with_gtp_remat":
                if arguments.source(name) != "False":
                    yield _GATHERED
            elif name not in self.signature.names:
                yield f"the table knows no argument {name!r} of {self.name}"


def _parsed(source: str) -> ast.AST:
    statement = ast.parse(source or "None").body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


def _outcomes(node: ast.AST) -> Iterator[list[str]]:
    """Yield for each outcome of a conditional expression the flags that are set; none for the last one."""
    if isinstance(node, ast.IfExp):
        yield [name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)]
        yield from _outcomes(node.orelse)
    else:
        yield []


def _filled(source: str, node: ast.AST, values: Mapping[str, str], leaves: list[str]) -> str:
    """Put arguments in the place of parameters, and decide the conditions; collect the outcomes that remain."""
    if isinstance(node, ast.IfExp):
        test = _decided(node.test, values)
        if isinstance(test, bool):
            return _filled(source, node.body if test else node.orelse, values, leaves)
        yes = _filled(source, node.body, values, leaves)
        no = _filled(source, node.orelse, values, leaves)
        if yes == no:
            return no
        otherwise = f"({no})" if " if " in no else no
        return f"{yes} if {test} else {otherwise}"
    start, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
    text = source[start:end] if source else ""
    leaves.append(text)
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in values]
    for name in sorted(names, key=lambda one: one.col_offset, reverse=True):
        place = name.col_offset - start
        text = text[:place] + values[name.id] + text[place + len(name.id) :]
    return text


def _decided(test: ast.expr, values: Mapping[str, str]) -> bool | str:
    """Return whether a condition holds; its source where that is known at run time only."""
    if isinstance(test, ast.BoolOp):
        parts = [_decided(part, values) for part in test.values]
        if False in parts:
            return False
        unknown = [part for part in parts if isinstance(part, str)]
        return " and ".join(unknown) if unknown else True
    source = values.get(ast.unparse(test), "False")
    value = ast.parse(source, mode="eval").body
    return bool(value.value) if isinstance(value, ast.Constant) else source
