"""Build the site: ``pip install -e '.[docs]' && python .docs/build.py FOLDER``.

The site of this version goes to ``FOLDER/VERSION``, next to those of other versions, among which its readers can
choose. Publish the whole folder, on any server of files. A warning, such as a link without a target, is an error.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from types import ModuleType

ROOT = Path(__file__).parents[1]
GUIDE = "examples/README.md"
# The public modules: each has a page of the reference.
MODULES = (
    "namedmesh",
    "namedmesh.launch",
    "namedmesh.tools.plan",
    "namedmesh.tensor_parallel",
    "namedmesh.training",
    "namedmesh.compat.deepspeed",
    "namedmesh.compat.fairscale",
    "namedmesh.compat.ezpz",
    "namedmesh.compat.megatron",
    "namedmesh.compat.megatron.tensor_parallel",
    "namedmesh.compat.process_groups",
)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
TOCTREE = "\n```{{toctree}}\n:hidden:\n:titlesonly:\n:caption: {}\n\n{}\n```\n"


def public_names(module: str) -> dict[str, object]:
    """Return what a module exports; names that are loaded when they are first used are loaded."""
    loaded = importlib.import_module(module)
    found = {name: getattr(loaded, name) for name in loaded.__all__}
    vars(loaded).update(found)  # autodoc looks there
    return found


def read(path: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def find_site_path(path: str) -> str:
    """Return where a file of the repository is in the sources of the site; a script becomes a page."""
    if path in {"README.md", GUIDE}:
        return "index.md" if path == "README.md" else "guide/index.md"
    page = path if path.endswith((".md", ".svg")) else f"{path}.md"
    return page.removeprefix("examples/")


def convert_page(path: str, text: str) -> str:
    """Return a page with links to other pages of the site, and with file names above its blocks."""

    def convert_link(link: re.Match[str]) -> str:
        target = find_site_path(normpath(join(dirname(path), link[1])))
        return f"]({relpath(target, dirname(find_site_path(path)))}"

    parts = BLOCK.split(text)
    parts[::2] = [LINK.sub(convert_link, part) for part in parts[::2]]  # the others are blocks of code
    block = r"```{code-block} \2\n:caption: \1\n"
    return re.sub(r"^<!-- file: (\S+) -->\n```(\w+)$", block, "".join(parts), flags=re.MULTILINE)


def list_sections() -> dict[str, list[str]]:
    """Return the entries of the navigation, by section: those of the tables of the guide, and the others."""
    sections = {}
    for title, rows in re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", read(GUIDE), re.MULTILINE):
        pages = re.findall(r"^\| \[(.+?)\]\(((?:guide|migrate|integrations)/.+?\.md)\)", rows, re.MULTILINE)
        if pages:
            sections[title] = [f"{name} <{page}>" for name, page in pages]
    sections["Reference"] = [f"reference/{module}" for module in MODULES]
    pages = ["guide/index", "benchmarks/README", "CHANGELOG", "CONTRIBUTING"]
    address = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]
    sections["Project"] = [*pages, f"Source <{address}>"] if address else pages
    return sections


def describe_module(module: str, shown: dict[int, str]) -> str:
    """Return the page of the reference for a module.

    Args:
        module: the name of the module.
        shown: the names of classes and functions on earlier pages, by their ids. Each is on one page only.
    """
    page = f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n"
    elsewhere = {}
    for name, value in public_names(module).items():
        if isinstance(value, ModuleType) and value.__name__ in MODULES:
            elsewhere[name] = value.__name__
        elif callable(value) and shown.setdefault(id(value), f"{module}.{name}") != f"{module}.{name}":
            elsewhere[name] = shown[id(value)]
    if elsewhere:
        page += f"   :exclude-members: {', '.join(elsewhere)}\n"
    for name, other in elsewhere.items():
        page += f"\n``{name}`` is :obj:`{other}`.\n"
    return page


def collect_pages(folder: Path) -> None:
    """Write the sources of all pages into a folder."""
    pages = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
    pages += [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.md")]
    sources = {}
    for page in pages:
        text = read(page)
        sources[find_site_path(page)] = convert_page(page, text)
        for link in LINK.findall(BLOCK.sub("", text)):
            path = normpath(join(dirname(page), link))
            if path not in pages:
                source = read(path)
                language = {".py": "python", ".sh": "bash"}.get(Path(path).suffix, "text")
                script = f"---\norphan: true\nnosearch: true\n---\n# {path}\n\n````{language}\n{source}````\n"
                sources[find_site_path(path)] = source if path.endswith(".svg") else script
    for title, names in list_sections().items():
        sources["index.md"] += TOCTREE.format(title, "\n".join(names))
    shown: dict[int, str] = {}
    for module in reversed(MODULES):  # the top of the package has names of the others
        sources[f"reference/{module}.rst"] = describe_module(module, shown)
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def list_versions(folder: Path) -> None:
    """Write the list of the versions in a folder, and a page that leads to the newest one."""
    from packaging.version import Version

    versions = [path.parent.name for path in folder.glob("*/index.html")]
    versions.sort(key=Version, reverse=True)
    (folder / "versions.json").write_text(json.dumps(versions))
    newest = f'<!doctype html><meta http-equiv="refresh" content="0; url={versions[0]}/">'
    (folder / "index.html").write_text(newest)


def main(folder: str) -> int:
    """Build the site into a folder; return the exit code."""
    from sphinx.cmd.build import build_main

    import namedmesh

    site = Path(folder, namedmesh.__version__)
    shutil.rmtree(site, ignore_errors=True)
    with tempfile.TemporaryDirectory() as collected:
        sources = Path(collected, "sources")
        collect_pages(sources)
        options = ["-q", "-W", "--keep-going", "-b", "dirhtml", "-c", str(Path(__file__).parent)]
        failed = build_main([*options, "-d", f"{collected}/doctrees", str(sources), str(site)])
    if not failed:
        list_versions(Path(folder))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
