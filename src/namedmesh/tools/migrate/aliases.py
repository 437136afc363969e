"""Follow re-exported names of a program to the legacy API that they come from."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from namedmesh.tools.migrate.table import API_OF_MODULE, APIS

_MAX_RE_EXPORTS = 8


def find_aliases(paths: Sequence[Path]) -> dict[str, str]:
    """Return the legacy names that modules of a program re-export, by their qualified names.

    Args:
        paths: the files of the program.
    """
    aliases: dict[str, str] = {}
    ambiguous: set[str] = set()
    for path in paths:
        for name, target in _read_imports(path).items():
            if aliases.setdefault(name, target) != target:
                ambiguous.add(name)
    for name in ambiguous:
        del aliases[name]
    legacy = {}
    starts = tuple(f"{module}." for module in API_OF_MODULE)
    for name in aliases:
        target = resolve(name, aliases)
        # A name without its module would be the name of any local variable, too.
        if "." in name and f"{target}.".startswith(starts):
            legacy[name] = target
    return legacy


def resolve(name: str, aliases: Mapping[str, str]) -> str:
    """Return the name that a qualified name re-exports; the name itself if it is no alias.

    Args:
        name: the name, with its modules.
        aliases: the name that each re-exported name has where it comes from.
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


def name_relative(path: Path, level: int, module: str | None) -> str:
    """Return the qualified name of a module that a file imports.

    Args:
        path: the file.
        level: the number of dots in front.
        module: the name behind them.
    """
    if not level:
        return module or ""
    package = path.resolve().parent.parts[1:]
    package = package[: len(package) - level + 1]
    return ".".join([*package, module] if module else package)


def _read_imports(path: Path) -> dict[str, str]:
    """Return the names that a file imports at its top, by their qualified names.

    The qualified name begins with any part of the path, because it is not known which folder is
    imported from. A file that cannot be read has none; the report says why when it is read for its
    uses.
    """
    try:
        source = path.read_bytes()
        tree = ast.parse(source) if b"import" in source else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    module = path.resolve().with_suffix("").parts[1:]
    if module[-1] == "__init__":
        module = module[:-1]
    aliases = {}
    for api in APIS:
        # Inside of a vendored copy, upstream's module has a longer name.
        if path.as_posix().endswith(f"/{api.source}"):
            aliases[".".join(module)] = api.modules[0]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            start = name_relative(path, node.level, node.module)
            for alias in node.names:
                for end in range(len(module)):
                    name = ".".join([*module[end:], alias.asname or alias.name])
                    aliases[name] = f"{start}.{alias.name}"
    return aliases
