"""Complete the metadata of the package: links that work on a package index, from the address in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = r"\[([^\[\]]*)\]\((?!\w+:|#)([^)\s]+)\)"


def convert_links(text: str, address: str, version: str) -> str:
    """Return the README with links to the files of a version.

    Args:
        text: the README, with links that are relative to the repository.
        address: the address of the repository; if it is empty, links become plain text, and pictures are omitted.
        version: the version, whose tag is ``v`` and this text.
    """
    pictures = rf"![\1]({address}/raw/v{version}/\2)" if address else ""
    links = rf"[\1]({address}/blob/v{version}/\2)" if address else r"\1"
    return re.sub(LINK, links, re.sub(f"!{LINK}", pictures, text))


class Metadata(MetadataHookInterface):
    """Sets ``readme`` and ``urls``, which ``[project]`` lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both for the version that is built."""
        address, version = self.config["address"].rstrip("/"), metadata["version"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": convert_links(text, address, version),
        }
        if address:
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{address}/blob/v{version}/examples/README.md",
                "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
