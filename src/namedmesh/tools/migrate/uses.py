"""Find the uses of legacy names in one file.

The imports of the file give each name a qualified name. The uses are plain data with positions in
bytes, so that a file can be rewritten without being parsed again.
"""

from __future__ import annotations

import ast
import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from namedmesh._errors import get_first_line
from namedmesh.tools.migrate.aliases import name_relative, resolve
from namedmesh.tools.migrate.table import (
    API_OF_MODULE,
    APIS,
    VIRTUAL,
    Advice,
    Arguments,
    LegacyApi,
    advise,
    initialize,
    list_unusual_arguments,
)

# A file that holds none of these names uses none of the legacy APIs, and is not parsed.
_NAMES = {"parallel_state", "mpu", "fairscale", "ezpz"}.union(*(api.rows for api in APIS))
_MARKS = re.compile(rf"\b(?:{'|'.join(sorted(_NAMES))})\b".encode())
# The functions that make a compatibility layer answer, and its legacy API.
_API_OF_INSTALLER = {f"{api.layer}.install": api.name for api in APIS}
_API_OF_INSTALLER |= {f"{api.layer}.bind": api.name for api in APIS}
_STAR = "its names cannot be followed: import those that are used, and run this command again"
_PASSED_ON = "the module itself is passed on or asked by a computed name"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CONDITIONS = (ast.If, ast.While, ast.For, ast.IfExp, ast.ExceptHandler, ast.Match)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda, *_COMPREHENSIONS)


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
        conditional_calls: by the name of a function that the file calls, whether it does so under
            a condition only.
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
    conditional_calls: dict[str, bool] = field(default_factory=dict)
    has_virtual: bool = False
    has_namedmesh: bool = False
    imports_end: int = 0


def read_file(path: Path, aliases: Mapping[str, str] = MappingProxyType({})) -> FileUses | str | None:
    """Find the uses of legacy names in a file.

    Args:
        path: the file.
        aliases: legacy names that modules of the program re-export, as
            :func:`namedmesh.tools.migrate.aliases.find_aliases` returns them.

    Returns:
        The uses; None if the file names no legacy API; a message if the file cannot be read.
    """
    try:
        source = path.read_bytes()
        if not _MARKS.search(source):
            return None
        # Of a text, the offsets of the tree are those in UTF-8, whatever encoding a comment names.
        tree = ast.parse(source.decode("utf-8-sig"))
        finder = _Finder(FileUses(path, source), aliases)
        finder.find(tree)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{path}: cannot be read: {get_first_line(error)}"
    except (RecursionError, MemoryError):
        return f"{path}: cannot be read: an expression is nested too deeply"
    finder.found.uses.sort(key=lambda use: use.start)
    return finder.found


Names = dict[str, set[str]]
"""The names of a scope, with the qualified names that imports give them.

An empty text is another object, such as a parameter.
"""


def _find_bindings(tree: ast.Module) -> dict[ast.AST, Names]:
    """Return the names that the module, and each function, class and comprehension, binds."""
    bindings: dict[ast.AST, Names] = {}
    scopes: list[ast.AST] = [tree]
    while scopes:
        scope = scopes.pop()
        names: Names = {}
        global_names: set[str] = set()
        for node in _iter_scope(scope):
            if isinstance(node, _SCOPES):
                scopes.append(node)
            elif isinstance(node, ast.Global):
                global_names.update(node.names)
            for name, qualified in _list_bound_names(node):
                names.setdefault(name, set()).add(qualified)
        bindings[scope] = names
        for name in global_names & names.keys():
            bindings[tree].setdefault(name, set()).update(names.pop(name))
    return bindings


def _iter_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of a scope, without the nodes inside of its functions and classes."""
    nodes = [*ast.iter_child_nodes(scope)]
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, _SCOPES):
            nodes.extend(ast.iter_child_nodes(node))


def _list_bound_names(node: ast.AST) -> list[tuple[str, str]]:
    """Return the names that one node binds, each with its qualified name if it is imported."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        start = ""
        if isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
        pairs = []
        for alias in node.names:
            # `import a.b` binds a. A name behind `from` has no dots.
            package = alias.name.partition(".")[0]
            pairs.append((alias.asname or package, start + (alias.name if alias.asname else package)))
        return pairs
    name: str | None = None
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        name = node.id
    elif isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        name = node.name
    return [(name, "")] if name else []


def _is_neutral(condition: ast.AST) -> bool:
    """Return whether groups exist after a condition in any case, or a script has it."""
    text = ast.unparse(condition)
    return "is_initialized" in text or "__name__" in text


class _Finder:
    """Fills a :class:`FileUses`, ``found``, from the syntax tree of its file."""

    def __init__(self, found: FileUses, aliases: Mapping[str, str]) -> None:
        self.found = found
        self._aliases = aliases
        # The nodes around the one that is visited, from the outside.
        self._parents: list[ast.AST] = []
        self._is_conditional = False
        self._bindings: dict[ast.AST, Names] = {}
        self._line_starts = [0]
        for line in found.source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        if found.source.startswith(codecs.BOM_UTF8):
            self._line_starts[0] = len(codecs.BOM_UTF8)

    def find(self, tree: ast.Module) -> None:
        """Record the uses in a file, and its effects on the rest of the program."""
        self._bindings = _find_bindings(tree)
        self.found.has_namedmesh = "namedmesh" in self._bindings[tree].get("namedmesh", ())
        last_line = 0
        for position, statement in enumerate(tree.body):
            is_docstring = position == 0 and ast.get_docstring(tree) is not None
            if not (is_docstring or isinstance(statement, (ast.Import, ast.ImportFrom))):
                # On the line of an import, a statement may need the new ones already.
                last_line = min(last_line, statement.lineno - 1)
                break
            last_line = statement.end_lineno or 0
        self.found.imports_end = self._line_starts[last_line] if last_line else 0
        self._visit(tree)

    def _visit(self, node: ast.AST) -> None:
        """Record a node, and the nodes inside of it unless they are a part of the same use."""
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in API_OF_MODULE:
            self._add(node.names[0], API_OF_MODULE[node.module], "*", Advice("", doubt=_STAR))
        was_conditional = self._is_conditional
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            calls = self.found.conditional_calls
            calls[name] = calls.get(name, True) and was_conditional
        elif isinstance(node, _CONDITIONS):
            test = getattr(node, "test", None)
            self._is_conditional |= test is None or not _is_neutral(test)
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.Call, ast.Attribute, ast.Name)) and self._find_use(node):
            children = children[1:]  # the first one is the function of a call, or the module in front
        self._parents.append(node)
        for child in children:
            self._visit(child)
        self._parents.pop()
        self._is_conditional = was_conditional

    def _look_up(self, name: str) -> set[str]:
        """Return the qualified names of a name where it is visited; empty if nothing binds it."""
        is_inside_function = False
        for node in reversed(self._parents):
            names = self._bindings.get(node)
            # A function does not see the names of the class around it.
            if names is None or (isinstance(node, ast.ClassDef) and is_inside_function):
                continue
            if name in names:
                return names[name]
            is_inside_function = True
        return set()

    def _find_use(self, node: Any) -> bool:
        """Record a node if its qualified name is a legacy name; return whether it is one."""
        attributes: list[str] = []
        part = node
        while not isinstance(part, ast.Name):
            if isinstance(part, ast.Attribute):
                attributes.insert(0, part.attr)
            elif not isinstance(part, (ast.Call, ast.Subscript)):
                return False
            part = part.func if isinstance(part, ast.Call) else part.value
        names = self._look_up(part.id)
        for name in sorted(names - {""}):
            relative = ".".join([name, *attributes])
            written = relative.lstrip(".")
            absolute = name_relative(self.found.path, len(relative) - len(written), written)
            qualified = resolve(absolute, self._aliases)
            if qualified == absolute:
                qualified = written
            if self._record_use(node, qualified, is_certain_name=len(names) == 1):
                return True
        return False

    def _record_use(self, node: Any, name: str, *, is_certain_name: bool) -> bool:
        """Record a use of a qualified name; return False if it belongs to no legacy API or layer."""
        module, _, leaf = name.rpartition(".")
        if name in _API_OF_INSTALLER:
            self.found.installed.add(_API_OF_INSTALLER[name])
            return True
        # `megatron.core.mpu` alone, or with one of its names behind it.
        api = API_OF_MODULE.get(name) or API_OF_MODULE.get(module)
        arguments = self._read_arguments(node)
        makes_groups = False
        advice: Advice | None
        if name in API_OF_MODULE:
            advice = Advice("", doubt=_PASSED_ON)
        elif api is not None and leaf == api.initializer:
            makes_groups = True
            advice = initialize(module, arguments)
            if module.startswith("namedmesh."):
                self.found.installed.add(api.name)  # the layer itself makes a mesh
            else:
                self._record_initialization(node, api, arguments)
        else:
            advice = advise(module, leaf, arguments)
            if not module or advice is None:
                return False
            if api is not None:
                self._record_assignment(node, api, leaf)
            doubt = advice.doubt or self._find_doubt(node, module, leaf, is_certain_name=is_certain_name)
            advice = advice._replace(doubt=doubt)
        self._add(node, api, leaf, advice, makes_groups=makes_groups)
        return True

    def _add(
        self, node: Any, api: LegacyApi | None, leaf: str, advice: Advice, *, makes_groups: bool = False
    ) -> None:
        source = leaf
        if isinstance(node, ast.Call):
            # Up to Python 3.11, positions inside of an f-string are not reliable.
            code = ast.unparse(node) if self._is_in_f_string() else self._read_source(node)
            code = " ".join(code.split())
            source += code[code.index("(") :]
        name = api.name if api else ""
        start, end = self._find_span(node)
        self.found.uses.append(Use(node.lineno, start, end, source, name, advice, makes_groups))

    def _find_span(self, node: Any) -> tuple[int, int]:
        """Return the offsets in bytes at which a node begins and ends."""
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _read_source(self, node: Any) -> str:
        start, end = self._find_span(node)
        return self.found.source[start:end].decode()

    def _is_in_f_string(self) -> bool:
        return any(isinstance(node, ast.JoinedStr) for node in self._parents)

    def _read_arguments(self, node: Any) -> Arguments:
        arguments: list[tuple[str, str]] = []
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Starred):
                    arguments.append(("*", self._read_source(argument.value)))
                else:
                    arguments.append(("", self._read_source(argument)))
            arguments += [
                (keyword.arg or "**", self._read_source(keyword.value)) for keyword in node.keywords
            ]
        return arguments

    def _find_doubt(  # noqa: PLR0911  one for each reason
        self, node: Any, module: str, leaf: str, *, is_certain_name: bool
    ) -> str:
        """Return the reason in this file why a use cannot be replaced; empty if there is none."""
        is_variable = leaf.startswith("_")
        if _is_stored(node):
            return "an assignment changes the answers of the legacy API, and not the mesh"
        if not isinstance(node, ast.Call) and not is_variable:
            return "it is passed on, not called: its arguments are given elsewhere"
        if is_variable and isinstance(node, ast.Name):
            return "an imported variable keeps the value that it had at the import"
        if "#" in self._read_source(node):
            return "a comment stands between its arguments"
        if not is_certain_name:
            return "the name can be something else here"
        if module not in API_OF_MODULE:
            return f"through {module}, which is not followed"
        if self._is_in_f_string():
            return "in an f-string, whose quotation marks may be in the way"
        if self._look_up("namedmesh") - {"namedmesh"}:
            return "the file has another object under the name namedmesh"
        return ""

    def _record_assignment(self, node: Any, api: LegacyApi, leaf: str) -> None:
        """Record that results are changed by an assignment, or by one of Megatron's setters."""
        if not leaf.startswith("set_") and not _is_stored(node):
            return
        if "virtual" in leaf.lower():
            self.found.has_virtual = True  # changes no answer that does not depend on virtual stages
            return
        self.found.obstacles.setdefault(api.name, {})[node.lineno] = f"changes answers by hand ({leaf})"

    def _record_initialization(self, node: Any, api: LegacyApi, arguments: Arguments) -> None:
        """Record where the layer has to be installed: at the start of the outermost function.

        The names may be imported in that function, too, and such a local name is not replaced by
        ``install()``.
        """
        given = list_unusual_arguments(arguments, api.parameters)
        for name in given.keys() & {"rank_offset", "local_world_size"}:
            text = f"makes groups over a part of the world ({name})"
            self.found.obstacles.setdefault(api.name, {})[node.lineno] = text
        function: Any = next((parent for parent in self._parents if isinstance(parent, _FUNCTIONS)), None)
        if not isinstance(node, ast.Call):  # passed on: another line calls it
            self.found.has_virtual = True
        else:
            self.found.has_virtual |= not given.keys().isdisjoint({VIRTUAL, "*", "**"})
            if not self._is_conditional:
                name = function.name if function else ""
                self.found.always_initialized.setdefault(api.name, set()).add(name)
        before: Any = [*self._parents, node][1]  # the statement of the module
        if function is not None:
            has_docstring = ast.get_docstring(function) is not None and len(function.body) > 1
            first = function.body[int(has_docstring)]
            line_start = self._line_starts[first.lineno - 1]
            # Without a line of its own, the statement of the module comes before the call.
            if not self.found.source[line_start : self._find_span(first)[0]].strip():
                before = first
        decorators: Sequence[ast.expr] = getattr(before, "decorator_list", ())
        line_start = self._line_starts[min(part.lineno for part in (before, *decorators)) - 1]
        line = self.found.source[line_start:]
        offset = line_start + len(line) - len(line.lstrip(b" \t"))
        self.found.initialized.setdefault(api.name, []).append(offset)


def _is_stored(node: Any) -> bool:
    """Return whether a name or an attribute is assigned or deleted."""
    return not isinstance(getattr(node, "ctx", None), (ast.Load, type(None)))
