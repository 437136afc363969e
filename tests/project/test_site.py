"""The site and the package's README: every link leads somewhere, on a server of files and on a package index."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import PAGES, ROOT

import namedmesh

SITE = runpy.run_path(str(ROOT / ".docs" / "build.py"))
LINKS = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def test_every_page_is_on_the_site_and_its_links_lead_to_pages(tmp_path: Path) -> None:
    SITE["collect_pages"](tmp_path)
    for page in tmp_path.rglob("*.md"):
        for link in LINKS.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file(), f"{page.relative_to(tmp_path)}: {link}"
    navigation = (tmp_path / "index.md").read_text(encoding="utf-8")
    for guide in PAGES[1:]:  # without the index itself
        assert (tmp_path / f"{guide.name}.md").is_file()
        assert f"<{guide.name}.md>" in navigation, f"{guide.name} is in no table of the guide"
    for module in SITE["MODULES"]:
        assert f"reference/{module}" in navigation
    first = (tmp_path / "guide" / "tensor_parallel.md").read_text(encoding="utf-8")
    assert "```{code-block} python\n:caption: shard.py\n" in first


def test_a_name_is_explained_on_one_page_of_the_reference() -> None:
    shown: dict[int, str] = {}
    of_room = SITE["describe_module"]("namedmesh.tensor_parallel", shown)
    at_the_top = SITE["describe_module"]("namedmesh", shown)
    assert "exclude-members" not in of_room
    assert "``parallelize`` is :obj:`namedmesh.tensor_parallel.parallelize`." in at_the_top
    assert "``training`` is :obj:`namedmesh.training`." in at_the_top


def test_the_newest_version_comes_first(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0", "0.10.0rc1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "index.html").touch()
    SITE["list_versions"](tmp_path)
    assert json.loads((tmp_path / "versions.json").read_text()) == ["0.10.0", "0.10.0rc1", "0.9.0"]
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("address", ["", "https://example.org/project/"])
def test_the_readme_of_a_package_has_no_relative_link(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    # hatchling, which is needed only to build, gives its hooks these two attributes.
    hatchling = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hatchling)
    hook: Any = runpy.run_path(str(ROOT / ".ci" / "metadata.py"))["Metadata"]()
    hook.root, hook.config = str(ROOT), {"address": address}
    metadata: dict[str, Any] = {"version": namedmesh.__version__}
    hook.update(metadata)
    text = metadata["readme"]["text"]
    assert LINKS.findall(text) == []
    found = re.findall(r"https://example\.org/project/(?:blob|raw)/v([^/]+)/([^)#\s]+)", text)
    assert len(found) == (len(LINKS.findall((ROOT / "README.md").read_text())) if address else 0)
    for version, path in found:
        assert version == namedmesh.__version__
        assert (ROOT / path).exists(), path
    assert ("![" in text) == ("urls" in metadata) == bool(address)
