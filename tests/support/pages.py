"""The pages of the guide: the blocks on them, and the sections and prose between the blocks.

A page is a Markdown file under ``examples/``. A comment above a block says what a test does with the block:

- ``<!-- file: NAME.py -->``: the block is saved under that name before the commands of the page run.
- ``<!-- signatures -->``: one call a line with its full signature, compared with the real one.
- ``<!-- from: PATH -->``: an excerpt, whose lines follow each other in that script or in that file of the page.
- ``<!-- run: NAME -->``: a test of its own runs the block.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("guide", "migrate", "integrations")


def blocks(text: str, language: str, mark: str = "") -> list[str]:
    """Return the blocks of a text in a language, or only those under a mark (a pattern)."""
    chosen = [block for block in all_blocks(text) if block.language == language]
    return [block.source for block in chosen if not mark or re.fullmatch(mark, block.mark)]


@dataclass(frozen=True)
class Block:
    """A fenced block: the comment above it (empty if none), its language and its lines."""

    mark: str
    language: str
    source: str


def all_blocks(text: str) -> list[Block]:
    """Return every fenced block of a text, in order."""
    pattern = r"(?:^<!-- ([^\n]+?) -->\n)?^```(\w*)\n(.*?)^```$"
    found = re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)
    return [Block(mark, language, source) for mark, language, source in found]


@dataclass(frozen=True)
class Page:
    """A page of the guide."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """The path under ``examples/`` without the suffix, e.g. ``guide/pipeline``."""
        if self.path.parent == ROOT:
            return f"../{self.path.stem}"
        return self.path.relative_to(ROOT / "examples").with_suffix("").as_posix()

    @property
    def files(self) -> dict[str, str]:
        """The blocks that the page gives a file name."""
        files = {}
        for block in all_blocks(self.text):
            if block.mark.startswith("file: "):
                files[block.mark.removeprefix("file: ")] = block.source
        return files

    def blocks(self, language: str, mark: str = "") -> list[str]:
        """Return the page's blocks in a language, or only those under a mark (a pattern)."""
        return blocks(self.text, language, mark)

    @property
    def titles(self) -> list[str]:
        """The headings of the page, without their number signs."""
        return re.findall(r"^#+ (.+)$", without_blocks(self.text), flags=re.MULTILINE)


def read_pages() -> list[Page]:
    """Return the index and every page of the guide."""
    paths = [ROOT / "examples" / "README.md"]
    for folder in FOLDERS:
        paths += sorted((ROOT / "examples" / folder).glob("*.md"))
    return [Page(path, path.read_text(encoding="utf-8")) for path in paths]


PAGES = read_pages()
README = Page(ROOT / "README.md", (ROOT / "README.md").read_text(encoding="utf-8"))


def find_blocks(language: str, mark: str = "", containing: str = "") -> list[str]:
    """Return the blocks of all pages in a language, under a mark, that contain some text; at least one."""
    found = []
    for page in PAGES:
        found += [block for block in page.blocks(language, mark) if containing in block]
    assert found, (language, mark, containing)
    return found


def without_blocks(text: str) -> str:
    """Return a text without its fenced blocks and comments."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^<!--.*?-->$", "", text, flags=re.MULTILINE | re.DOTALL)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and list items of a text. Tables, pictures, headings and blocks are no prose."""
    found = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)", without_blocks(text)):
        lines = [line for line in part.strip().splitlines() if not line.startswith(("|", "#", "!["))]
        if lines:
            found.append(" ".join(lines))
    return found


def count_words(prose: str) -> int:
    """Return the number of words; a code span or the address of a link is one word at most."""
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return len(re.sub(r"`[^`]*`", "code", prose).split())


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph."""
    paragraph = re.sub(r"\]\([^)]*\)", "]", paragraph)
    paragraph = re.sub(r"`[^`]*`", "code", paragraph)
    return re.split(r"(?<=[.!?:;])\s+", paragraph)


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def contains(source: str, excerpt: str) -> bool:
    """Whether the lines of an excerpt follow each other in a source, whatever the indentation."""
    wanted = textwrap.dedent(excerpt).strip("\n")
    lines = source.splitlines()
    count = len(wanted.splitlines())
    for start in range(len(lines) - count + 1):
        if textwrap.dedent("\n".join(lines[start : start + count])).strip("\n") == wanted:
            return True
    return False
