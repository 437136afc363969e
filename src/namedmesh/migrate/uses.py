"""Find the uses of legacy names in one module, by the scopes and imports that LibCST determines."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, ScopeProvider

from namedmesh.errors import did_you_mean
from namedmesh.migrate.apis import APIS, GPT_NEOX_MPU, MEGATRON
from namedmesh.migrate.files import Source, key_of
from namedmesh.migrate.initialize import NEWER_ARGUMENTS
from namedmesh.migrate.names import USUAL_NAMES, Legacy, has_usual_name, imported, is_dotted, is_none
from namedmesh.migrate.rules import Advice, Row
from namedmesh.migrate.scan import INITIALIZE_NAME, Finding, Missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from libcst.metadata import CodeRange, Scope

    from namedmesh.migrate.names import Names

_ASSIGNED = (
    "an assignment patches what the legacy calls answer and no mesh; where a test stands in for groups, give it a mesh "
    "of its own, adopted with NamedMesh.from_groups({'tp': group, ...})"
)
_REFERENCE = "passed on, not called: arguments that are given where it is called can ask for another group"
_BY_STRING = "passed on as a string: what is done with it is not known here"
_COMPUTED = "which name it is, is known only when it runs"
_IN_FSTRING = (
    "an f-string before Python 3.12 cannot hold these quotation marks: assign it to a variable first"
)
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
_OBJECT_AND_NAME = 2
_DOTTED_PATHS = ("megatron.", "fairscale.", "namedmesh.")
_SETTERS = ("setattr", "delattr", "object")  # the last one of mock.patch
_LAYERS = "megatron.core.tensor_parallel"
PROVIDED = frozenset(
    (
        *("megatron", "megatron.core", *MEGATRON.modules, _LAYERS),
        *(f"{_LAYERS}.{part}" for part in ("cross_entropy", "layers", "mappings", "utils")),
    )
)
"""What can be imported after ``install()`` where megatron-core is not installed."""
_ABSENT = frozenset(f"{_LAYERS}.{part}" for part in ("data", "random", "inference_layers"))


class Uses(cst.CSTVisitor):
    """Collect the uses of legacy names, and the imports that only megatron-core has, of one module.

    Args:
        source: the module.
        path: its file.
        names: what the modules of the code base stand for.
        release: the release of megatron-core that the code runs with; empty if that is not known.
    """

    def __init__(self, source: Source, path: Path, names: Names, release: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.missing: set[Missing] = set()
        self._source, self._names, self._release = source, names, release
        self._key, self._is_package = key_of(path), path.stem == "__init__"
        self._values: dict[cst.CSTNode, cst.BaseExpression] = {}  # by the name that is assigned
        self._calls: dict[cst.CSTNode, cst.Call] = {}  # by the called expression
        self._bound: set[cst.CSTNode] = set()  # names that are no uses
        self._changed: dict[
            cst.CSTNode, str
        ] = {}  # assigned and deleted attributes, as the report shows them
        self._quotes: list[str] = []
        self._nodes: list[tuple[cst.BaseExpression, tuple[str, ...]]] = []
        self._imports: list[tuple[cst.CSTNode, list[str]]] = []
        self._stars: list[str] = []
        self._dotted: dict[tuple[Scope | None, str], set[str | None]] = {}

    def run(self, module: cst.Module, *, imports_only: bool = False) -> Uses:
        """Visit a module; names are looked up when all of it was seen, since a function may use what is bound below."""
        self._module = module
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self._scopes = {} if imports_only else wrapper.resolve(ScopeProvider)
        module.visit(self)
        found = [(node, quotes, self._legacy_of(node)) for node, quotes in self._nodes]
        found = [one for one in found if one[2]]
        self._positions = wrapper.resolve(PositionProvider) if found or self._imports else {}
        for node, quotes, meaning in found:
            if meaning and isinstance(node, cst.Call):
                self._add_named_by_string(node, *meaning, quotes)
            elif meaning:
                self._add_use(node, *meaning, quotes)
        for statement, modules in self._imports:
            line = self._positions[statement].start.line
            self.missing |= {Missing(*self._source.locate(line), module) for module in modules}
        return self

    # What the module has.

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Note what a node imports, binds, changes, or may be."""
        quotes = tuple(self._quotes)
        self._note_binding(node)
        match node:
            case cst.Import() | cst.ImportFrom():
                self._note_import(node)
                return False
            case cst.FormattedString():
                self._quotes.append(node.quote)
            case cst.Call():
                self._calls[node.func] = node
                if len(node.args) >= _OBJECT_AND_NAME:
                    self._nodes.append((node, quotes))
            case cst.Attribute():
                self._nodes.append((node, quotes))
                return not is_dotted(node)
            case cst.Name() if node not in self._bound and self._scopes.get(node) is not None:
                self._nodes.append((node, quotes))
            case cst.SimpleString() if node.raw_value.startswith(_DOTTED_PATHS):  # as mock.patch takes them
                self._nodes.append((node, ()))
        return True

    def _note_binding(self, node: cst.CSTNode) -> None:
        match node:
            case cst.FunctionDef() | cst.ClassDef() | cst.Param():
                self._bound.add(node.name)
            case cst.Assign():
                for target in node.targets:
                    self._bind(target.target, node.value)
            case cst.AnnAssign() | cst.NamedExpr():
                self._bind(node.target, node.value)
            case cst.AugAssign():
                self._bind(node.target, None)
            case cst.Del(target=cst.Attribute()):
                self._changed[node.target] = "del {}"

    def on_leave(self, original_node: cst.CSTNode) -> None:
        """Leave an f-string."""
        if isinstance(original_node, cst.FormattedString):
            self._quotes.pop()

    def _note_import(self, node: cst.Import | cst.ImportFrom) -> None:
        targets = dict(imported(node, self._key, is_package=self._is_package))
        modules = [dotted for name, dotted in targets.items() if name != "*"]
        if "*" in targets:
            self._stars.append(targets["*"])
        if isinstance(node, cst.Import):
            modules = [alias.evaluated_name for alias in node.names]
        else:
            module = "" if node.relative else get_full_name_for_node(node.module or "") or ""
            if module == _LAYERS:  # its functions are there
                modules = [name for name in modules if name in _ABSENT]
            elif module not in {"megatron", "megatron.core"}:
                modules = [module]
        absent = [name for name in modules if name.startswith("megatron.") and name not in PROVIDED]
        absent = [name for name in absent if not self._names.has_package(name)]
        if absent:
            self._imports.append((node, absent))

    def _bind(self, target: cst.BaseExpression, value: cst.BaseExpression | None) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self._bind(element.value, None)
        elif isinstance(target, cst.Attribute):
            self._changed[target] = "{} = ..."
        else:
            self._bound.add(target)
            if value is not None:
                self._values[target] = value

    # What it means.

    def _legacy_of(self, node: cst.BaseExpression) -> tuple[Legacy, str] | None:
        """Return what an expression is of a legacy API, and why that is in doubt, if it is; None for anything else."""
        if isinstance(node, cst.SimpleString):
            dotted: set[str | None] = {str(node.evaluated_value)}
        elif isinstance(node, cst.Call):  # of getattr and its like, with the module and a name
            node = node.args[0].value
            dotted = self._dotted_of(node)
        else:
            dotted = self._dotted_of(node)
        found = [self._names.meanings(one) if one else {None} for one in dotted]
        meanings: set[Legacy | None] = set().union(*found)
        known = sorted((one for one in meanings if one), key=lambda one: (one.api.name, one.name))
        if not known:
            name = self._name_like(node, dotted)
            api = next((api for api in APIS if name in api.table or name == ""), None)
            return (Legacy(api, name), _BY_NAME) if api and name is not None else None
        if len(meanings) > 1:
            return known[0], _SEVERAL
        mine = known[0].api is GPT_NEOX_MPU and not self._names.defines(GPT_NEOX_MPU)
        return known[0], _WHICH_MPU if mine else ""

    def _name_like(self, node: cst.BaseExpression, dotted: set[str | None]) -> str | None:
        """Return the legacy name that an expression looks like, as ``self.mpu.get_x`` does, unless it is imported.

        Returns:
            The empty string for the module itself, None for anything else.
        """
        found = None
        for one in dotted:
            if one and one not in self._names and not one.startswith("/"):
                return None
            *_, module, last = ["", "", *(one or "").split(".")]
            if module in USUAL_NAMES:
                found = last
        if isinstance(node, cst.Attribute) and has_usual_name(node.value):
            found = node.attr.value
        return "" if found is None and has_usual_name(node) else found

    def _dotted_of(self, node: cst.BaseExpression) -> set[str | None]:
        """Return the dotted names that an expression can be; None stands for anything else but the literal None."""
        if isinstance(node, cst.IfExp):
            return self._dotted_of(node.body) | self._dotted_of(node.orelse)
        if isinstance(node, cst.BooleanOperation):
            return self._dotted_of(node.left) | self._dotted_of(node.right)
        if is_none(node):
            return set()
        if not is_dotted(node):
            return {None}
        first: cst.BaseExpression = node
        while isinstance(first, cst.Attribute):
            first = first.value
        name, _, rest = (get_full_name_for_node(node) or "").partition(".")
        key = (self._scopes.get(first), name)
        if key not in self._dotted:
            self._dotted[key] = {None}  # for a name that is assigned to itself
            self._dotted[key] = self._bound_to(*key)
        return {f"{one}.{rest}".rstrip(".") if one else None for one in self._dotted[key]}

    def _bound_to(self, scope: Scope | None, name: str) -> set[str | None]:
        """Return the dotted names that a name is bound to in its scope."""
        assignments = scope[name] if scope is not None else ()
        if not assignments:
            if name.startswith("_"):
                return {None}
            found = [f"{star}.{name}" for star in self._stars]
            return {one for one in found if any(map(_has_row, self._names.meanings(one)))} or {None}
        dotted: set[str | None] = set()
        for assignment in assignments:
            node = getattr(assignment, "node", None)
            if isinstance(node, (cst.Import, cst.ImportFrom)):
                pairs = imported(node, self._key, is_package=self._is_package)
                dotted |= {target for bound, target in pairs if bound == name}
            else:
                dotted |= self._dotted_of(self._values[node]) if node in self._values else {None}
        return dotted

    # Findings.

    def _add_use(self, node: cst.BaseExpression, legacy: Legacy, doubt: str, quotes: tuple[str, ...]) -> None:
        row = legacy.api.table.get(legacy.name)
        if isinstance(node, cst.SimpleString):
            if row:
                self._add_change(node, legacy, repr(node.evaluated_value), doubt)
        elif node in self._changed:
            if row or (not legacy.name and doubt != _BY_NAME):
                self._add_change(
                    node, legacy, self._changed[node].format(legacy.name or legacy.api.name), doubt
                )
        elif not legacy.name or "." in legacy.name or legacy.name.startswith("__"):
            return
        elif row is None:
            note = f"the table has no such name{did_you_mean(legacy.name, legacy.api.table)}"
            self._add(node, legacy, legacy.name, Advice("", notes=(note,)), doubt)
        elif node in self._calls:
            self._add_call(self._calls[node], legacy, row, doubt, quotes)
        else:
            self._add_reference(node, legacy, row, doubt, quotes)

    def _add_call(
        self, call: cst.Call, legacy: Legacy, row: Row, doubt: str, quotes: tuple[str, ...]
    ) -> None:
        written = ast.parse(f"({self._module.code_for_node(call)}\n)", mode="eval").body
        assert isinstance(written, ast.Call)  # noqa: S101  what was parsed is one
        own = self._names.definition(legacy.api, legacy.name)
        advice = row.advise(written, own)
        given = ", ".join(ast.unparse(argument) for argument in (*written.args, *written.keywords))
        if "ignore_virtual" in row.legacy and legacy.api is MEGATRON and not (given or own):
            doubt = doubt or ("" if self._release >= _EXPLICIT_SINCE else _VIRTUAL)
        if (
            row.name == INITIALIZE_NAME
            and own
            and not {*own.names} <= {*row.signature.names, *NEWER_ARGUMENTS}
        ):
            doubt = doubt or _OWN_PARAMETERS
        if doubt == _BY_NAME:
            advice = replace(advice, notes=(*advice.notes, *_elsewhere(legacy, advice, written)))
        if "#" in self._module.code_for_node(call):
            advice = replace(advice, notes=(*advice.notes, _COMMENT))
        changes = row.name.startswith("set_") and given != "None"
        self._add(call, legacy, f"{row.name}({given})", advice, doubt, quotes=quotes, changes=changes)

    def _add_reference(
        self, node: cst.BaseExpression, legacy: Legacy, row: Row, doubt: str, quotes: tuple[str, ...]
    ) -> None:
        advice = row.advise(None, self._names.definition(legacy.api, legacy.name))
        if row.is_function and advice.replacement:
            notes = advice.notes + ((_REFERENCE,) if " if " in row.replacement else ())
            advice = replace(advice, replacement=f"lambda: {advice.replacement}", notes=notes)
        self._add(node, legacy, row.name, advice, doubt, quotes=quotes)

    def _add_named_by_string(
        self, call: cst.Call, legacy: Legacy, doubt: str, quotes: tuple[str, ...]
    ) -> None:
        """Add the use in ``getattr(mpu, "get_x")`` and its like, ``setattr`` and the patches of tests among them."""
        if legacy.name:
            return
        function = get_full_name_for_node(call.func)
        name = call.args[1].value
        written = ast.unparse(ast.parse(f"({self._module.code_for_node(call)}\n)", mode="eval"))
        if not isinstance(name, cst.SimpleString):
            if function in {"getattr", "setattr"} and not doubt:
                changes = function == "setattr"
                self._add(call, legacy, written, Advice("", notes=(_COMPUTED,)), doubt, changes=changes)
            return
        row = legacy.api.table.get(str(name.evaluated_value))
        if row is None or function == "hasattr":
            return
        legacy = Legacy(legacy.api, row.name)
        if function != "getattr":
            setter = (function or "").rpartition(".")[2] in _SETTERS
            note = _ASSIGNED if setter else _BY_STRING
            self._add(call, legacy, written, Advice("", notes=(note,)), doubt, changes=True)
        elif call in self._calls:
            self._add_call(self._calls[call], legacy, row, doubt, quotes)
        else:
            self._add_reference(call, legacy, row, doubt, quotes)

    def _add_change(self, node: cst.BaseExpression, legacy: Legacy, written: str, doubt: str) -> None:
        self._add(node, legacy, written, Advice("", notes=(_ASSIGNED,)), doubt, changes=True)

    def _add(
        self,
        node: cst.BaseExpression,
        legacy: Legacy,
        written: str,
        advice: Advice,
        doubt: str,
        *,
        quotes: tuple[str, ...] = (),
        changes: bool = False,
    ) -> None:
        place: CodeRange = self._positions[node]
        path, line = self._source.locate(place.start.line)
        if quotes and advice.replacement:
            advice = _quoted(advice, quotes)
        self.findings.append(
            Finding(
                path,
                line,
                place.start.column + 1,
                legacy.name,
                written,
                advice.replacement,
                advice.once,
                advice.notes + ((doubt,) if doubt else ()),
                not doubt,
                (place.end.line, place.end.column + 1)
                if isinstance(node, cst.Call) and not self._source.cells
                else None,
                legacy.api.name,
                changes,
            )
        )


def _has_row(legacy: Legacy | None) -> bool:
    return legacy is not None and legacy.name in legacy.api.table


def _elsewhere(legacy: Legacy, advice: Advice, call: ast.Call) -> Iterator[str]:
    """Yield what a call is in the other APIs that have a function of this name, where that is something else."""
    for api in APIS:
        row = api.table.get(legacy.name)
        other = row.advise(call).replacement if row else ""
        if other and other != advice.replacement:
            yield f"in {api.name} it is {other}"


def _quoted(advice: Advice, quotes: tuple[str, ...]) -> Advice:
    """Write the quotation marks that the f-strings around an expression allow before Python 3.12."""
    if len(quotes) == 1 and quotes[0][0] == "'":
        return advice
    if len(quotes) == 1 and "'" not in advice.replacement:
        return replace(advice, replacement=advice.replacement.replace('"', "'"))
    return replace(advice, notes=(*advice.notes, _IN_FSTRING))
