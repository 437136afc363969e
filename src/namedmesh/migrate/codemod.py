"""Find the names of the table in files, replace those that are certain, and report the rest: LibCST, with its qualified names."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
from libcst import metadata
from libcst.codemod import CodemodContext, VisitorBasedCodemodCommand
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor

from namedmesh.errors import UsageError, count_of
from namedmesh.migrate import APIS, Advice, advise

# What stands in every file that can name something of the tables: others are not parsed.
_MARKS = re.compile(
    rb"\b(?:parallel_state|mpu|megatron\.core|fairscale|(?:get|is)_\w*(?:parallel|pipeline)_\w)"
)
_PACKAGE = metadata.QualifiedName("namedmesh", metadata.QualifiedNameSource.IMPORT)


class Finding(NamedTuple):
    """One use of a legacy name: where, its source, and what replaces it; nothing where it stays."""

    line: int
    old: str
    advice: Advice


class Changes(VisitorBasedCodemodCommand):
    """What is found in one source, and, if asked, the source with what is certain replaced.

    ``initialize_model_parallel`` becomes a mesh, ``bound`` to Megatron. Imports of names that are ``kept`` stay, as other modules
    take them from this one.
    """

    METADATA_DEPENDENCIES = (
        metadata.QualifiedNameProvider,
        metadata.PositionProvider,
        metadata.ExpressionContextProvider,
        metadata.ScopeProvider,
    )

    def __init__(
        self, source: str, *, bound: bool = False, kept: Collection[str] = (), rewrite: bool = True
    ) -> None:
        super().__init__(CodemodContext())
        self.before, self.bound, self.kept, self.rewrite = source, bound, kept, rewrite
        self.findings: list[Finding] = []
        # Each a module, the name that is taken from it, if one is, and the name that it is given, if another is.
        self.imports: list[tuple[str, str | None, str | None]] = []
        self.called: set[cst.CSTNode] = set()
        self.quoted = self.rewritten = 0
        self.after = self.transform_module(cst.parse_module(source)).code

    def readers(self) -> list[str]:
        """Return the modules of megatron-core beside parallel_state that are imported."""
        dotted = {".".join(filter(None, one[:2])) for one in self.imports}
        modules = {".".join(name.split(".")[:3]) for name in dotted if name.startswith("megatron.core.")}
        return sorted(modules.difference(APIS))

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Note imports, which are not replaced, functions that are called, and where f-strings begin."""
        if isinstance(node, cst.ImportFrom):
            module = "" if node.module is None or node.relative else self.module.code_for_node(node.module)
            names = () if isinstance(node.names, cst.ImportStar) else node.names
            self.imports += [(module, one.evaluated_name, one.evaluated_alias) for one in names]
        elif isinstance(node, cst.Import):
            self.imports += [(one.evaluated_name, None, one.evaluated_alias) for one in node.names]
        elif isinstance(node, cst.FormattedString):
            self.quoted += 1
        elif isinstance(node, cst.Call):
            self.called.add(node.func)
        return not isinstance(node, (cst.Import, cst.ImportFrom))

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Replace calls, and names that are read; at the end, say which imports may be unused."""
        if isinstance(original_node, cst.FormattedString):
            self.quoted -= 1
        elif isinstance(original_node, (cst.Attribute, cst.Name, cst.Call)):
            if original_node not in self.called:
                return self._used(original_node, updated_node)
        elif isinstance(original_node, cst.Module) and self.rewritten:
            for module, name, alias in self.imports:
                known = module in APIS or f"{module}.{name}" in APIS
                if known and (alias or name) not in self.kept:
                    RemoveImportsVisitor.remove_unused_import(self.context, module, name, alias)
        return updated_node

    def _used(self, node: Any, updated: Any) -> Any:
        """Note a use of a legacy name; return what replaces it, or where that is not certain or it is none, what stands there."""
        called, arguments = isinstance(node, cst.Call), list[tuple[str, str]]()
        for each in node.args if called else ():
            keyword = each.keyword.value if each.keyword else each.star
            arguments.append((keyword, self.module.code_for_node(each.value)))
        names = self.get_metadata(metadata.QualifiedNameProvider, node, ())
        for one in names:
            module, _, leaf = one.name.rpartition(".")
            imported = module and one.source is metadata.QualifiedNameSource.IMPORT
            advice = advise(module, leaf, arguments, bound=self.bound) if imported else None
            if advice is not None:
                break
        else:
            return updated
        code = " ".join(self.module.code_for_node(node).split())
        old = leaf + code[code.index("(") :] if called else leaf
        load = metadata.ExpressionContext.LOAD
        stored = self.get_metadata(metadata.ExpressionContextProvider, node, load) is not load
        scope: Any = self.get_metadata(metadata.ScopeProvider, node)
        others = scope.get_qualified_names_for("namedmesh") - {_PACKAGE}
        doubts = {
            "an assignment changes what legacy calls answer, and no mesh": stored,
            advice.doubt: bool(advice.doubt),
            "passed on, not called: its arguments are given elsewhere": not (called or leaf.startswith("_")),
            "a comment stands between its arguments": "#" in code,
            "the name can be something else here": len(names) > 1,
            f"through {module}, which is not followed": module not in APIS,
            "in an f-string, whose quotation marks may be in the way": self.quoted > 0,
            "the file has a namedmesh of its own": bool(others),
        }
        advice = advice._replace(doubt=next((text for text, holds in doubts.items() if holds), ""))
        line = self.get_metadata(metadata.PositionProvider, node).start.line
        self.findings.append(Finding(line, old, advice))
        if advice.doubt or not self.rewrite:
            return updated
        self.rewritten += 1
        AddImportsVisitor.add_needed_import(self.context, "namedmesh")
        if ".bind(" in advice.new:
            AddImportsVisitor.add_needed_import(self.context, "namedmesh.compat.megatron")
        new = re.sub(r"(?<![\w.])mesh\.", "namedmesh.current_mesh().", advice.new)
        return cst.parse_expression(new)  # a call or a subscript: what is certain needs no parentheses


def migrate(arguments: Namespace) -> int:
    """Scan, report, and perhaps write; 1 if a file could not be read."""
    if arguments.write and not arguments.force:
        _check_clean(arguments.paths)
    files = dict[Path, None]()
    for path in arguments.paths:
        files |= dict.fromkeys(sorted(path.rglob("*.py")) if path.is_dir() else [path])
    found, problems = _scan([*files])
    doubtful = any(one.advice.doubt for changes in found.values() for one in changes.findings)
    bound = doubtful or any(changes.readers() for changes in found.values())
    # What files import from modules of the code itself: there, these imports stay.
    imports = [one for changes in found.values() for one in changes.imports]
    kept = {name for module, name, _ in imports if name and not {module, f"{module}.{name}"} & {*APIS}}
    rewrite = arguments.diff or arguments.write
    # Now that all files are known; otherwise it is what was found.
    again = [path for path, changes in found.items() if changes.findings and (rewrite or bound)]
    for path in again:
        found[path] = changes = Changes(found[path].before, bound=bound, kept=kept, rewrite=rewrite)
        if arguments.write and changes.after != changes.before:
            path.write_bytes(changes.after.encode("utf-8"))
            sys.stdout.write(f"{path}: rewritten\n")
        elif arguments.diff:
            lines = changes.before.splitlines(keepends=True), changes.after.splitlines(keepends=True)
            sys.stdout.write("".join(unified_diff(*lines, f"a/{path}", f"b/{path}")))
    sys.stdout.write(_report(found, len(files), certain=not rewrite))
    notebooks = sum(len(list(path.rglob("*.ipynb"))) for path in arguments.paths)
    if notebooks:
        sys.stdout.write(f"\n{count_of(notebooks, 'notebook')}: not read\n")
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def _check_clean(paths: Sequence[Path]) -> None:
    """Raise unless git has everything that could be overwritten."""
    for path in paths:
        folder = path if path.is_dir() else path.parent
        words = ["git", "-C", str(folder), "status", "--porcelain", "--", str(path.resolve())]
        done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603  our own words
        if done.returncode or done.stdout:
            words_of_git = done.stderr or f"uncommitted changes:\n{done.stdout}"
            raise UsageError(f"git says of {path}: {words_of_git}Commit, or give --force to write anyway")


def _scan(paths: Sequence[Path]) -> tuple[dict[Path, Changes], list[str]]:
    """Return what is found in the files that may name an API, and a sentence for each file that cannot be read."""
    found, problems = dict[Path, Changes](), list[str]()
    for number, path in enumerate(paths, 1):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number} of {len(paths)} files" + ("\n" if number == len(paths) else ""))
        try:
            data = path.read_bytes()
            if _MARKS.search(data):
                found[path] = Changes(data.decode("utf-8"), rewrite=False)
        except (OSError, UnicodeDecodeError, cst.ParserSyntaxError) as error:
            problems.append(f"{path}: cannot be read: {str(error).splitlines()[0]}")
    return found, problems


def _report(found: dict[Path, Changes], files: int, *, certain: bool) -> str:
    """Write what replaces each use, what runs once, and how many there are."""
    lines, once, doubts, readers = list[str](), dict[str, None](), list[str](), list[str]()
    for path, changes in found.items():
        for line, old, (new, statements, doubt) in sorted(changes.findings, key=lambda one: one.line):
            doubts.append(doubt)
            once |= dict.fromkeys(statements)
            if certain or doubt:
                words = f" (not certain: {doubt})" if doubt else ""
                lines.append(f"{path}:{line}: {old}{words} -> {new or 'stays'}")
        if changes.readers():
            readers.append(f"    {path}: {', '.join(changes.readers())}")
    if once:
        lines += ["", "Once, on every rank, after init_mesh:", *(f"    {statement}" for statement in once)]
    if not doubts and not readers:
        return f"No use of megatron.core.parallel_state in {count_of(files, 'file')}.\n"
    if doubts:
        sure = doubts.count("")
        lines += ["", f"{count_of(len(doubts), 'use')} in {count_of(files, 'file')}, {sure} of them certain."]
    if readers:
        text = "These modules of megatron-core read parallel_state: keep the mesh bound to Megatron."
        lines += ["", text, *readers]
    return "\n".join(lines).lstrip("\n") + "\n"
