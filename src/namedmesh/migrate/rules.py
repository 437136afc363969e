"""What one line of the migration table is, and how the arguments of a call choose among its replacements."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["DIALECT", "Advice", "Arguments", "Entry", "Variant"]

DIALECT = "namedmesh.compat.megatron.parallel_state"
"""The module that has every legacy name, whether or not a mesh call replaces it."""

_TRUE_BY_DEFAULT = ("check_initialized", "ignore_virtual")
_UNCHECKED = (
    "check_initialized=False answered None before initialisation; a mesh that exists always has its axes, "
    "and an unknown axis is an AxisError"
)


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
        """The arguments of a call to a function with the given parameters."""
        named = {}
        rest = []
        for place, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred):
                rest.append(ast.unparse(argument))
            elif not rest and place < len(parameters):
                named[parameters[place]] = argument
        for keyword in call.keywords:
            if keyword.arg is None:
                rest.append(f"**{ast.unparse(keyword.value)}")
            else:
                named[keyword.arg] = keyword.value
        return cls(named, ", ".join(rest))

    def flag(self, name: str) -> bool | str:
        """Whether a flag is set; the source of the expression where that is not known before it runs."""
        if name not in self.named:
            return name in _TRUE_BY_DEFAULT
        given = self.named[name]
        return bool(given.value) if isinstance(given, ast.Constant) else self.source(name)

    def source(self, name: str) -> str:
        """The source of an argument, ready to stand inside another expression; its name if it is not given."""
        given = self.named.get(name)
        if given is None:
            return name
        text = ast.unparse(given)
        simple = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple)
        return text if isinstance(given, simple) else f"({text})"


@dataclass(frozen=True)
class Advice:
    """What to write in place of one call.

    Args:
        replacement: a Python expression; empty where the name stays in the dialect.
        once: statements that every rank runs once, after the mesh is made, before the expression is asked.
        notes: what to know, one sentence each.
    """

    replacement: str
    once: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One replacement of a name, and the flags that it goes with.

    Args:
        replacement: as in :class:`Advice`, with ``{parameter}`` where the source of an argument goes.
        once: as in :class:`Advice`, likewise.
        note: what to know.
        when: the flags that must have these values; without any, the replacement goes with every call.
    """

    replacement: str
    once: tuple[str, ...] = ()
    note: str = ""
    when: tuple[tuple[str, bool], ...] = ()

    def advice(self, arguments: Arguments, parameters: Sequence[str]) -> Advice:
        """The replacement, with the arguments of a call put in."""
        sources = {name: arguments.source(name) for name in parameters}
        return Advice(
            _filled(self.replacement, sources),
            tuple(_filled(statement, sources) for statement in self.once),
            (self.note,) * bool(self.note),
        )


@dataclass(frozen=True)
class Entry:
    """One legacy name.

    Args:
        name: the name.
        parameters: the parameters of a function, in order; None for a name that is no function.
        variants: the replacements, those with more flags first, the one for every other call last.
        examples: calls for the page; by default one for each variant.
        render: makes the advice where the arguments say more than flags do.

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
        if self.examples:
            return self.examples
        return tuple(
            f"{self.name}({', '.join(f'{flag}={is_set}' for flag, is_set in one.when)})"
            for one in self.variants
        )

    def advise(self, arguments: Arguments) -> Advice:
        """The replacement of one call; both of two, joined by the flag that is not known before it runs."""
        if self.render is not None:
            return self.render(arguments)
        advice = self._chosen(self.variants, arguments)
        notes = advice.notes
        if arguments.rest and len(self.variants) > 1:
            others = " or ".join(dict.fromkeys(one.replacement for one in self.variants))
            notes += (f"the flags in {arguments.rest} decide: {others}",)
        if arguments.flag("check_initialized") is not True:
            notes += (_UNCHECKED,)
        return Advice(advice.replacement, advice.once, notes)

    def _chosen(self, variants: Sequence[Variant], arguments: Arguments) -> Advice:
        first, *others = variants
        open_flags = []
        for name, wanted in first.when:
            given = arguments.flag(name)
            if isinstance(given, str):
                open_flags.append(given if wanted else f"not {given}")
            elif given != wanted:
                return self._chosen(others, arguments)
        yes = first.advice(arguments, self.parameters or ())
        if not open_flags:
            return yes
        no = self._chosen(others, arguments)
        if yes.replacement == no.replacement:
            return no
        otherwise = f"({no.replacement})" if " if " in no.replacement else no.replacement
        return Advice(
            f"{yes.replacement} if {' and '.join(open_flags)} else {otherwise}",
            tuple(dict.fromkeys(yes.once + no.once)),
            tuple(dict.fromkeys(yes.notes + no.notes)),
        )


def _filled(template: str, sources: Mapping[str, str]) -> str:
    for name, source in sources.items():
        template = template.replace(f"{{{name}}}", source)
    return template
