"""Find the uses of legacy names in one file, by LibCST's scopes and qualified names.

A file is parsed once. Its uses are kept as plain data, with positions in bytes, so that files can
be read in parallel processes, and rewritten later without parsing them again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import libcst as cst
from libcst import metadata

from namedmesh.errors import get_first_line
from namedmesh.migrate.table import (
    API_OF_MODULE,
    APIS,
    EZPZ,
    FAIRSCALE,
    MEGATRON,
    VIRTUAL,
    Advice,
    Arguments,
    LegacyApi,
    advise,
    initialize,
)

_TABLE_NAMES = {*MEGATRON, *FAIRSCALE, *EZPZ}
# A file that holds none of these names uses none of the legacy APIs, and is not parsed.
_MARKS = re.compile(rf"\b(?:parallel_state|mpu|fairscale|ezpz|{'|'.join(sorted(_TABLE_NAMES))})\b".encode())
# The modules from which an import is looked up, by their beginning or end.
_LEGACY_IMPORT = re.compile(r"^(?:megatron|fairscale|ezpz|namedmesh)\b|\b(?:parallel_state|mpu)$")
_NAMEDMESH = metadata.QualifiedName("namedmesh", metadata.QualifiedNameSource.IMPORT)
# The functions that make a compatibility layer answer, and its legacy API.
_API_OF_INSTALLER = {f"{api.layer}.install": api.name for api in APIS}
_API_OF_INSTALLER |= {f"{api.layer}.bind": api.name for api in APIS}
_STAR = "its names cannot be followed: import those that are used, and run this command again"
_MAX_RE_EXPORTS = 8
_CONDITIONS = (ast.If, ast.While, ast.For, ast.IfExp, ast.ExceptHandler, ast.Match)
_CST_CONDITIONS = (cst.If, cst.While, cst.For, cst.IfExp, cst.ExceptHandler, cst.Match)
_HANDED_ON = "the module itself is passed on or asked by a computed name"


class Use(NamedTuple):
    """One use of a legacy name.

    Attributes:
        line: the line, from 1.
        start: the offset in bytes at which the use begins.
        end: the offset in bytes at which it ends.
        source: the source of the use, without the module in front.
        api: the name of the legacy API; empty for a name that a module of the program re-exports.
        advice: the replacement; its doubt does not depend on the rest of the program.
        makes_groups: whether it is a use of ``initialize_model_parallel``.
    """

    line: int
    start: int
    end: int
    source: str
    api: str
    advice: Advice
    makes_groups: bool = False


@dataclass
class FileUses:
    """The uses of legacy names in one file, and its effects on the rest of the program.

    Attributes:
        path: the file.
        source: its content.
        uses: in the order of the file.
        initialized: for each legacy API whose groups the file makes, the offsets in bytes before
            which the compatibility layer has to be installed.
        installed: the legacy APIs for which the file installs or binds a compatibility layer.
        obstacles: for each legacy API, the places where a mesh would return something else than the
            program, by their line: a result that is changed by hand, or groups over a part of the
            world.
        always_initialized: for each legacy API, the functions that make its groups in every run of
            them; an empty name for the top of the file.
        calls_in_conditions: the functions that the file calls under a condition only.
        has_virtual: whether the file asks for virtual pipeline stages, or may do so.
        has_namedmesh: whether the name ``namedmesh`` is imported at the top of the file.
        imports_end: the offset in bytes of the line after the first imports of the file.
    """

    path: Path
    source: bytes
    uses: list[Use] = field(default_factory=list)
    initialized: dict[str, list[int]] = field(default_factory=dict)
    installed: set[str] = field(default_factory=set)
    obstacles: dict[str, dict[int, str]] = field(default_factory=dict)
    always_initialized: dict[str, set[str]] = field(default_factory=dict)
    calls_in_conditions: set[str] = field(default_factory=set)
    has_virtual: bool = False
    has_namedmesh: bool = False
    imports_end: int = 0


def read_file(path: Path, aliases: Mapping[str, str] = MappingProxyType({})) -> FileUses | str | None:
    """Find the uses of legacy names in a file.

    Args:
        path: the file.
        aliases: legacy names that modules of the program re-export, as :func:`resolve` takes them.

    Returns:
        The uses; None if the file names no legacy API; a message if the file cannot be read.
    """
    try:
        source = path.read_bytes()
        if not _MARKS.search(source):
            return None
        tree = ast.parse(source)
        imports = _find_legacy_imports(tree, path, aliases)
        # A file may only mention the names, in a comment for example. LibCST is slow.
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if not imports and attributes.isdisjoint(_TABLE_NAMES):
            return None
        wrapper = metadata.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        finder = _Finder(path, source, wrapper.module, imports, aliases)
        wrapper.visit(finder)
    except (OSError, SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        return f"{path}: cannot be read: {get_first_line(error)}"
    except (RecursionError, MemoryError):
        return f"{path}: cannot be read: an expression is nested too deeply"
    finder.found.uses.sort(key=lambda use: use.start)
    finder.found.calls_in_conditions = _find_conditional_calls(tree)
    return finder.found


def resolve(name: str, aliases: Mapping[str, str]) -> str:
    """Return the name that a qualified name re-exports; the name itself if it is no alias.

    Args:
        name: the name, with its modules.
        aliases: the name that each re-exported name stands for.
    """
    for _ in range(_MAX_RE_EXPORTS):
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            target = aliases.get(".".join(parts[:end]))
            if target is not None:
                name = ".".join([target, *parts[end:]])
                break
        else:
            break
    return name


def read_aliases(path: Path) -> dict[str, str]:
    """Return the names that a file imports at its top, by their qualified names.

    The qualified name begins with any part of the path, because it is not known which folder is
    imported from. A file that cannot be read has none; :func:`read_file` reports it.
    """
    try:
        source = path.read_bytes()
        tree = ast.parse(source) if b"import" in source else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    module = name_module(path)
    aliases = {}
    for api in APIS:
        # Inside of a vendored copy, it has a longer name.
        if path.as_posix().endswith(f"/{api.source}"):
            aliases[".".join(module)] = api.modules[0]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            start = name_relative(path, node.level, node.module)
            for alias in node.names:
                target = f"{start}.{alias.name}"
                for end in range(len(module)):
                    aliases[".".join([*module[end:], alias.asname or alias.name])] = target
    return aliases


def name_module(path: Path) -> list[str]:
    """Return the parts of the longest name that a file may have as a module."""
    parts = [*path.resolve().with_suffix("").parts[1:]]
    return parts[:-1] if parts[-1] == "__init__" else parts


def name_relative(path: Path, level: int, module: str | None) -> str:
    """Return the qualified name of a module that a file imports.

    Args:
        path: the file.
        level: the number of dots in front.
        module: the name behind them.
    """
    if not level:
        return module or ""
    package = [*path.resolve().parent.parts[1:]]
    package = package[: len(package) - level + 1]
    return ".".join([*package, module] if module else package)


def _find_conditional_calls(tree: ast.Module) -> set[str]:
    """Return the names of the functions that a file calls under a condition only."""
    called: dict[str, bool] = {}

    def visit(node: ast.AST, is_conditional: bool) -> None:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            called[name] = called.get(name, True) and is_conditional
        if isinstance(node, _CONDITIONS) and not _is_neutral(ast.unparse(getattr(node, "test", node))):
            is_conditional = True
        for child in ast.iter_child_nodes(node):
            visit(child, is_conditional)

    visit(tree, False)
    return {name for name, is_conditional in called.items() if is_conditional}


def _is_neutral(condition: str) -> bool:
    """Return whether groups exist after a condition in any case, or a script has it."""
    return "is_initialized" in condition or "__name__" in condition


def _find_legacy_imports(tree: ast.Module, path: Path, aliases: Mapping[str, str]) -> set[str]:
    """Return the local names of imports that may be legacy names or namedmesh.

    LibCST's scopes resolve such a name at each place. That is slow, so only these names are looked
    up.
    """
    names = set()
    re_exporting = set()
    for name in aliases:
        module = name
        while module:
            re_exporting.add(module)
            module = module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _LEGACY_IMPORT.search(alias.name) or alias.name in re_exporting:
                    names.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            start = name_relative(path, node.level, node.module)
            for alias in node.names:
                legacy = f"{node.module or ''}.{alias.name}"
                is_legacy = _LEGACY_IMPORT.search(legacy) or alias.name in _TABLE_NAMES
                if is_legacy or f"{start}.{alias.name}" in re_exporting:
                    names.add(alias.asname or alias.name)
    return names


def _get_name_node(node: Any) -> Any:
    """Return the node with the name of a use: the function of a call, or the node itself."""
    return node.func if isinstance(node, cst.Call) else node


class _Finder(cst.CSTVisitor):
    """Visitor that fills a :class:`FileUses`, ``found``, from the syntax tree of a file."""

    # LibCST's providers for qualified names, expression contexts and lines compute them for every
    # node, which takes several times as long as all the rest.
    METADATA_DEPENDENCIES = (metadata.ByteSpanPositionProvider, metadata.ScopeProvider)

    def __init__(
        self, path: Path, source: bytes, module: cst.Module, imports: set[str], aliases: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.found = FileUses(path, source)
        self._aliases = aliases
        # The conditions around the node that is visited, other than whether groups exist.
        self._conditions: list[cst.CSTNode] = []
        self.module = module
        self._imports = imports
        # Names and attributes that are assigned or deleted.
        self._stored: set[cst.CSTNode] = set()
        # Names that are a part of a larger use: the function of a call, the module before a dot.
        self._inner: set[cst.CSTNode] = set()
        self._f_strings = 0
        # The top-level statement, and the outermost function, around the node that is visited.
        self._statement: cst.CSTNode | None = None
        self._functions: list[cst.FunctionDef] = []
        self._find_first_imports()

    def _find_first_imports(self) -> None:
        """Record the last of the first imports of the file; new imports are added after it."""
        last: cst.CSTNode | None = None
        for position, statement in enumerate(self.module.body):
            # LibCST has one line of `import a; import b` as one statement with small ones.
            small = statement.body if isinstance(statement, cst.SimpleStatementLine) else []
            is_import = bool(small) and all(isinstance(part, (cst.Import, cst.ImportFrom)) for part in small)
            is_docstring = position == 0 and self.module.get_docstring() is not None
            if not (is_import or is_docstring):
                break
            last = statement
        self._last_import = last

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Process a node before its children; skip the children of an import."""
        if self._statement is None and isinstance(node, (cst.BaseStatement, cst.SimpleStatementLine)):
            self._statement = node  # the first statement inside of the module
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            self._record_import(node)
            return False
        if isinstance(node, cst.FunctionDef):
            self._functions.append(node)
        elif isinstance(node, cst.FormattedString):
            self._f_strings += 1
        elif isinstance(node, _CST_CONDITIONS):
            test = getattr(node, "test", None)
            if test is None or not _is_neutral(self.module.code_for_node(test)):
                self._conditions.append(node)
        elif isinstance(node, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.Del)):
            self._stored.add(node.target)
        elif isinstance(node, (cst.Call, cst.Attribute, cst.Name)) and self._may_be_legacy(node):
            self._visit_name(node)
        return True

    def _may_be_legacy(self, node: Any) -> bool:
        """Return whether a name may be a legacy name, so that its scope has to be resolved."""
        if node in self._inner:
            return False
        part = _get_name_node(node)
        if isinstance(part, cst.Attribute) and part.attr.value in _TABLE_NAMES:
            return True
        while isinstance(part, cst.Attribute):
            part = part.value
        return isinstance(part, cst.Name) and part.value in self._imports

    def on_leave(self, node: cst.CSTNode) -> None:
        """End the function, f-string, statement or imports that a node is."""
        if node is self._statement:
            self._statement = None
        if isinstance(node, cst.FunctionDef):
            self._functions.pop()
        elif isinstance(node, cst.FormattedString):
            self._f_strings -= 1
        elif self._conditions and node is self._conditions[-1]:
            self._conditions.pop()
        elif node is self._last_import:
            # Without a line end after them, the imports end with the file.
            line_end = self.found.source.find(b"\n", self._find_span(node)[1])
            self.found.imports_end = line_end + 1 or len(self.found.source)

    def _record_import(self, node: cst.Import | cst.ImportFrom) -> None:
        """Record ``import namedmesh`` outside of functions, and star imports."""
        if isinstance(node, cst.ImportFrom):
            if isinstance(node.names, cst.ImportStar) and node.module is not None:
                module = self.module.code_for_node(node.module)
                if module in API_OF_MODULE:
                    self._add(node.names, API_OF_MODULE[module], "*", Advice("", doubt=_STAR))
            return
        if not self._functions:
            for alias in node.names:
                package = alias.evaluated_name.partition(".")[0]
                if package == "namedmesh" and alias.asname is None:
                    self.found.has_namedmesh = True

    def _visit_name(self, node: Any) -> None:
        """Resolve the qualified name of a node, and record the node if it is a legacy name."""
        is_call = isinstance(node, cst.Call)
        if is_call:
            self._inner.add(node.func)
        scope: Any = self.get_metadata(metadata.ScopeProvider, node, None)
        names = scope.get_qualified_names_for(node) if scope is not None else ()
        for name in names:
            if name.source is not metadata.QualifiedNameSource.IMPORT:
                continue
            absolute = name.name
            if absolute.startswith("."):
                level = len(absolute) - len(absolute.lstrip("."))
                absolute = name_relative(self.found.path, level, absolute.lstrip("."))
            qualified = resolve(absolute, self._aliases)
            if qualified == absolute:
                qualified = name.name.lstrip(".")
            if self._record_use(node, qualified, is_certain_name=len(names) == 1):
                self._skip_inner_names(node)
                return
        # No use: the function of the call may be one by itself, such as a module that is called.
        if is_call:
            self._inner.discard(node.func)

    def _skip_inner_names(self, node: Any) -> None:
        """Mark the names inside of a recorded use, so that they are not recorded themselves."""
        part = _get_name_node(node)
        while isinstance(part, cst.Attribute):
            self._inner.update((part, part.attr))
            part = part.value
        self._inner.add(part)

    def _record_use(self, node: Any, name: str, *, is_certain_name: bool) -> bool:
        """Record a use of a qualified name; return False if it belongs to no legacy API or layer."""
        module, _, leaf = name.rpartition(".")
        if name in _API_OF_INSTALLER:
            self.found.installed.add(_API_OF_INSTALLER[name])
            return True
        if name in API_OF_MODULE:
            # `megatron.core.mpu` alone, not with one of its names behind it.
            self._add(node, API_OF_MODULE[name], leaf, Advice("", doubt=_HANDED_ON))
            return True
        api = API_OF_MODULE.get(module)
        arguments = self._read_arguments(node)
        if api is not None and leaf == api.initializer:
            if module.startswith("namedmesh."):
                self.found.installed.add(api.name)  # the layer itself makes a mesh
            else:
                self._record_initialization(node, api, arguments)
            self._add(node, api, leaf, initialize(module, arguments), makes_groups=True)
            return True
        advice = advise(module, leaf, arguments)
        if not module or advice is None:
            return False
        if api is not None:
            self._record_assignment(node, api, leaf)
        doubt = advice.doubt or self._find_doubt(node, module, leaf, is_certain_name=is_certain_name)
        self._add(node, api, leaf, advice._replace(doubt=doubt))
        return True

    def _add(
        self, node: Any, api: LegacyApi | None, leaf: str, advice: Advice, *, makes_groups: bool = False
    ) -> None:
        code = " ".join(self.module.code_for_node(node).split())
        source = leaf + code[code.index("(") :] if isinstance(node, cst.Call) else leaf
        name = api.name if api else ""
        start, end = self._find_span(node)
        self.found.uses.append(Use(self._find_line(node), start, end, source, name, advice, makes_groups))

    def _find_span(self, node: Any) -> tuple[int, int]:
        """Return the offsets in bytes at which a node begins and ends."""
        span = self.get_metadata(metadata.ByteSpanPositionProvider, node)
        return span.start, span.start + span.length

    def _find_line(self, node: Any) -> int:
        return self.found.source.count(b"\n", 0, self._find_span(node)[0]) + 1

    def _read_arguments(self, node: Any) -> Arguments:
        arguments = []
        if isinstance(node, cst.Call):
            for argument in node.args:
                keyword = argument.keyword.value if argument.keyword else argument.star
                arguments.append((keyword, self.module.code_for_node(argument.value)))
        return arguments

    def _find_doubt(  # noqa: PLR0911  one for each reason
        self, node: Any, module: str, leaf: str, *, is_certain_name: bool
    ) -> str:
        """Return the reason in this file why a use cannot be replaced; empty if there is none."""
        is_variable = leaf.startswith("_")
        if node in self._stored:
            return "an assignment changes the answers of the legacy API, and not the mesh"
        if not isinstance(node, cst.Call) and not is_variable:
            return "it is passed on, not called: its arguments are given elsewhere"
        if is_variable and isinstance(node, cst.Name):
            return "an imported variable keeps the value that it had at the import"
        if "#" in self.module.code_for_node(node):
            return "a comment stands between its arguments"
        if not is_certain_name:
            return "the name can be something else here"
        if module not in API_OF_MODULE:
            return f"through {module}, which is not followed"
        if self._f_strings:
            return "in an f-string, whose quotation marks may be in the way"
        scope: Any = self.get_metadata(metadata.ScopeProvider, node)
        if scope.get_qualified_names_for("namedmesh") - {_NAMEDMESH}:
            return "the file has another object under the name namedmesh"
        return ""

    def _record_assignment(self, node: Any, api: LegacyApi, leaf: str) -> None:
        """Record that results are changed by an assignment, or by one of Megatron's setters."""
        is_setter = leaf.startswith("set_")
        if not is_setter and node not in self._stored:
            return
        if "virtual" in leaf.lower():
            self.found.has_virtual = True  # changes no answer that does not depend on virtual stages
            return
        self._add_obstacle(node, api, f"changes answers by hand ({leaf})")

    def _add_obstacle(self, node: Any, api: LegacyApi, text: str) -> None:
        line = self._find_line(node)
        self.found.obstacles.setdefault(api.name, {})[line] = f"{self.found.path}:{line} {text}"

    def _record_initialization(self, node: Any, api: LegacyApi, arguments: Arguments) -> None:
        """Record where the layer has to be installed: at the start of the outermost function.

        The names may be imported in that function, too, and such a local name is not replaced by
        ``install()``.
        """
        for position, (keyword, source) in enumerate(arguments):
            is_virtual = keyword == VIRTUAL or (not keyword and position == 2)  # noqa: PLR2004  its position
            if keyword in {"*", "**"} or (is_virtual and source != "None"):
                self.found.has_virtual = True
            if keyword in {"rank_offset", "local_world_size"}:
                self._add_obstacle(node, api, f"makes groups over a part of the world ({keyword})")
        if not isinstance(node, cst.Call):  # passed on: another line calls it
            self.found.has_virtual = True
        elif not self._conditions:
            function = self._functions[0].name.value if self._functions else ""
            self.found.always_initialized.setdefault(api.name, set()).add(function)
        # Without a function around it, the call is preceded by its own statement.
        before: Any = self._statement
        if self._functions and isinstance(self._functions[0].body, cst.IndentedBlock):
            statements = self._functions[0].body.body
            has_docstring = self._functions[0].get_docstring() is not None and len(statements) > 1
            before = statements[int(has_docstring)]
        # LibCST does not count decorators as a part of the function's or class's own span.
        first = [*getattr(before, "decorators", ()), before][0]
        self.found.initialized.setdefault(api.name, []).append(self._find_span(first)[0])
