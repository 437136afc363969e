"""Find every use of a name of the tables in a code base, and what replaces it; the code is neither changed nor run."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from namedmesh.errors import did_you_mean
from namedmesh.migrate.apis import API, APIS, GPT_NEOX_MPU, INITIALIZE_NAME, MEGATRON
from namedmesh.migrate.codebase import CodeBase, Legacy
from namedmesh.migrate.files import TOO_DEEP
from namedmesh.migrate.findings import Finding, Missing, Problem, Scan
from namedmesh.migrate.initialize import NEWER_ARGUMENTS
from namedmesh.migrate.module import USUAL_NAMES, dotted_name, first_arguments, is_usual
from namedmesh.migrate.rules import Advice, Row, axes_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from namedmesh.migrate.module import Module, Use

_ASSIGNED = (
    "an assignment patches what the legacy calls answer and no mesh; where a test stands in for groups, give it a mesh "
    "of its own, adopted with NamedMesh.from_groups({'tp': group, ...})"
)
_REFERENCE = "passed on, not called: arguments that are given where it is called can ask for another group"
_BY_STRING = "passed on as a string: what is done with it is not known here"
_COMPUTED = "which name it is, is known only when it runs"
_IN_FSTRING = (
    "in this f-string it stays: not every Python would take its quotation marks, or the f-string would show another "
    "expression; assign it to a variable first"
)
_MARK = "namedmesh_migrate"
_COMMENT = "a comment stands between its arguments"
_OWN_PARAMETERS = "the code's own function of this name has other parameters"
_BY_NAME = "by name only: no import says where it comes from"
_SEVERAL = "the name can be something else here: another value is bound to it, or several files have its module's name"
_WHICH_MPU = "GPT-NeoX's megatron.mpu; Megatron had one too, in which 'model parallel' spans tp and pp"
_VIRTUAL = (
    "up to megatron-core 0.12 ignore_virtual is False unless it is given; say so in the call, or give migrate the release "
    "with --megatron 0.13"
)
_EXPLICIT_SINCE = (0, 13)
_SETTERS = ("setattr", "delattr", "object")  # the last one of mock.patch


def scan(paths: Sequence[str | os.PathLike[str]], *, megatron: str | None = None) -> Scan:
    """Find every use of Megatron's, fairscale's or GPT-NeoX's groups, also by way of the code's own modules.

    Args:
        paths: modules, notebooks, and folders of them.
        megatron: the release of megatron-core that the code runs with, such as ``"0.13"``, if that is known.

    Example:
        >>> scan([]).findings
        ()
    """
    code = CodeBase(paths)
    release = tuple(map(int, re.findall(r"\d+", megatron or "")))
    problems = list(code.problems.values())
    findings: list[Finding] = []
    for module in code.modules:
        try:
            findings += findings_of(module, code, release)
        except RecursionError:  # noqa: PERF203  the other files are read
            problems.append(Problem(module.source.path, TOO_DEEP))
    findings.sort()
    missing = {
        Missing(*module.source.locate(line), name)
        for module in code.modules
        for line, needed in module.imports
        for name in needed
        if ".".join(name.split(".")[:2]) not in code.packages
    }
    return Scan(
        len(code.files),
        tuple(_doubted(findings)),
        tuple(sorted(problems)),
        tuple(sorted(missing)),
        sources={module.source.path: module.source for module in code.modules},
    )


def _doubted(findings: list[Finding]) -> Iterator[Finding]:
    """Yield the uses, in doubt where the code changes their answers elsewhere, by ``set_...`` or by an assignment."""
    changes = [(one, _changed_axes(one)) for one in findings if one.changes]
    for one in findings:
        own = axes_of(one.replacement)
        may_change = one.certain and not one.changes and one.name != INITIALIZE_NAME
        for by, axes in changes if may_change else ():
            same_table = API[by.origin].table is API[one.origin].table
            if same_table and (axes is None or axes & own):
                note = f"{by.legacy} in {by.path}:{by.line} can change the answer"
                yield replace(one, certain=False, notes=(*one.notes, note))
                break
        else:
            yield one


def _changed_axes(one: Finding) -> set[str] | None:
    """Return the axes about which a change makes the legacy calls answer differently; None if it is not known."""
    if one.name in {"", INITIALIZE_NAME}:
        return None
    getter = one.name.lower().replace("_mpu_", "get_", 1) if one.name.startswith("_MPU_") else one.name
    if getter.startswith("set_"):
        getter = getter.replace("set_", "get_", 1)
    return axes_of(API[one.origin].table[getter].replacement)


def findings_of(module: Module, code: CodeBase, release: tuple[int, ...]) -> Iterator[Finding]:
    """Yield the uses of legacy names in one module, for a release of megatron-core; empty if that is not known."""
    uses = _Uses(module, code, release)
    for use in module.uses:
        found = uses.finding(use)
        if found:
            yield found


class _Uses:
    def __init__(self, module: Module, code: CodeBase, release: tuple[int, ...]) -> None:
        self._source, self._code, self._release = module.source, code, release
        self._taken: set[tuple[int, int]] = set()  # the places in f-strings where an expression was found

    def finding(self, use: Use) -> Finding | None:
        """Return what one expression is, if it is a legacy name."""
        meaning = self._meaning(use)
        if meaning is None:
            return None
        return (self._argument if use.argument_of else self._name)(use, *meaning)

    # What it means.

    def _meaning(self, use: Use) -> tuple[Legacy, str] | None:
        """Return what an expression is of a legacy API, and why that is in doubt, if it is; None for anything else."""
        meanings = self._code.meanings(use.dotted)
        known = sorted((one for one in meanings if one), key=lambda one: (one.api.name, one.name))
        if not known:
            name = self._name_like(use)
            api = next((api for api in APIS if name in api.table or name == ""), None)
            return (Legacy(api, name), _BY_NAME) if api and name is not None else None
        if len(meanings) > 1:
            return known[0], _SEVERAL
        mine = known[0].api is GPT_NEOX_MPU and not self._code.defines(GPT_NEOX_MPU)
        return known[0], _WHICH_MPU if mine else ""

    def _name_like(self, use: Use) -> str | None:
        """Return the legacy name that an expression looks like, as ``self.mpu.get_x`` does, unless it is imported."""
        found = None
        for one in use.dotted:
            if one is None or one.startswith("*"):
                continue
            if not one.startswith("/") and one not in self._code:
                return None
            *_, module, last = ["", "", *one.split(".")]
            if module in USUAL_NAMES:
                found = last
        if is_usual("".join(use.parts[-2:-1])):
            found = use.parts[-1]
        return "" if found is None and is_usual(use.parts[-1]) else found

    # What replaces it.

    def _name(self, use: Use, legacy: Legacy, doubt: str) -> Finding | None:
        row = legacy.api.table.get(legacy.name)
        if isinstance(use.node, ast.Constant):
            written = repr(".".join(use.parts))
            return self._remarked(use, legacy, written, _ASSIGNED, doubt, changes=True) if row else None
        if use.change:
            if not row and (legacy.name or doubt == _BY_NAME):
                return None
            written = use.change.format(legacy.name or legacy.api.name)
            return self._remarked(use, legacy, written, _ASSIGNED, doubt, changes=True)
        if not legacy.name or "." in legacy.name or legacy.name.startswith("__"):
            return None
        if row is None:
            note = f"the table has no such name{did_you_mean(legacy.name, legacy.api.table)}"
            return self._remarked(use._replace(call=None), legacy, legacy.name, note, doubt)
        return self._read(use, legacy, row, doubt)

    def _argument(self, use: Use, legacy: Legacy, doubt: str) -> Finding | None:
        """Return the use in ``getattr(mpu, "get_x")`` and its like, ``setattr`` and the patches of tests among them."""
        call = cast("ast.Call", use.argument_of)
        function = dotted_name(call.func)
        name = first_arguments(call)[1]
        written = ast.unparse(call)
        if legacy.name:
            return None
        if not isinstance(name, ast.Constant):
            if doubt:
                return None
            return self._remarked(use, legacy, written, _COMPUTED, doubt, changes=function == "setattr")
        row = legacy.api.table.get(str(name.value))
        if row is None or function == "hasattr":
            return None
        legacy = Legacy(legacy.api, row.name)
        if function == "getattr":
            return self._read(use, legacy, row, doubt)
        note = _ASSIGNED if function.rpartition(".")[2] in _SETTERS else _BY_STRING
        return self._remarked(use, legacy, written, note, doubt, changes=True)

    def _read(self, use: Use, legacy: Legacy, row: Row, doubt: str) -> Finding:
        """Return the use of a name that is called or passed on."""
        own = self._code.definition(legacy.api, legacy.name)
        call = use.call
        advice = row.advise(call, own)
        if call is None:
            if row.is_function and advice.replacement:
                notes = advice.notes + ((_REFERENCE,) if " if " in row.replacement else ())
                advice = replace(advice, replacement=f"lambda: {advice.replacement}", notes=notes)
            return self._finding(use, legacy, row.name, advice, doubt)
        given = ", ".join(ast.unparse(argument) for argument in (*call.args, *call.keywords))
        if "ignore_virtual" in row.legacy and legacy.api is MEGATRON and not (given or own):
            doubt = doubt or ("" if self._release >= _EXPLICIT_SINCE else _VIRTUAL)
        known = {*row.signature.names, *NEWER_ARGUMENTS}
        if row.name == INITIALIZE_NAME and own and not {*own.names} <= known:
            doubt = doubt or _OWN_PARAMETERS
        notes = (*advice.notes, *_elsewhere(legacy, advice, call)) if doubt == _BY_NAME else advice.notes
        if call.lineno != call.end_lineno and "#" in self._source.between(*self._source.span(call)):
            notes = (*notes, _COMMENT)
        changes = row.name.startswith("set_") and given != "None"
        advice = replace(advice, notes=notes)
        return self._finding(use, legacy, f"{row.name}({given})", advice, doubt, changes=changes)

    def _remarked(
        self, use: Use, legacy: Legacy, written: str, note: str, doubt: str, *, changes: bool = False
    ) -> Finding:
        return self._finding(use, legacy, written, Advice("", notes=(note,)), doubt, changes=changes)

    def _finding(
        self, use: Use, legacy: Legacy, written: str, advice: Advice, doubt: str, *, changes: bool = False
    ) -> Finding:
        node = use.call or use.argument_of or use.node
        start, end = self._place(node, use.fstring)
        if use.fstring:
            whole = self._source.between(*self._source.span(use.fstring))
            advice = _quoted(advice, whole) if end else replace(advice, notes=(*advice.notes, _IN_FSTRING))
        if not isinstance(node, ast.Call) or self._source.cells:
            end = None
        path, line = self._source.locate(start[0])
        return Finding(
            path,
            line,
            start[1],
            legacy.name,
            written,
            advice.replacement,
            advice.once,
            advice.notes + ((doubt,) if doubt else ()),
            not doubt,
            end,
            legacy.api.name,
            changes,
        )

    def _place(
        self, node: ast.expr, fstring: ast.JoinedStr | None
    ) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Return where an expression starts and ends; the start of the f-string around it where that is not certain.

        Before Python 3.12 the syntax tree of an f-string has some places wrong. A place is right if the text there is the
        expression, and if with another name in its place the f-string has that name.
        """
        if fstring is None:
            return self._source.span(node)
        first, last = self._source.span(fstring)
        try:
            start, end = self._source.span(node)
            found = _expression(self._source.between(start, end))
            marked = f"{self._source.between(first, start)}{_MARK}{self._source.between(end, last)}"
            # Two where the f-string shows the expression itself
            marks = ast.dump(_expression(marked)).count(_MARK)
        except (SyntaxError, ValueError, IndexError):
            return first, None
        if ast.dump(found) != ast.dump(node) or marks != 1 or start in self._taken:
            return first, None
        self._taken.add(start)
        return start, end


def _expression(code: str) -> ast.expr:
    return ast.parse(f"({code}\n)", mode="eval").body


def _quoted(advice: Advice, fstring: str) -> Advice:
    """Write a replacement with the quotation marks that the f-string around it allows before Python 3.12."""
    if '"' not in advice.replacement:
        return advice
    mark = fstring[-1]
    other = "'" if mark == '"' else '"'
    is_one = re.fullmatch(rf"\w+({mark}|{mark * 3})[^{mark}]*\1", fstring)
    if other not in fstring or (is_one and not re.search(rf"[fF][rR]?{other}", fstring)):
        return replace(advice, replacement=advice.replacement.replace('"', other))
    return replace(advice, notes=(*advice.notes, _IN_FSTRING))


def _elsewhere(legacy: Legacy, advice: Advice, call: ast.Call) -> Iterator[str]:
    """Yield what a call is in the other APIs that have a function of this name, where that is something else."""
    for api in APIS:
        row = api.table.get(legacy.name)
        other = row.advise(call).replacement if row else ""
        if other and other != advice.replacement:
            yield f"in {api.name} it is {other}"
