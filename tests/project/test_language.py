"""The language of the sources: words of docstrings and comments, and the density of the code.

The tests hold first lines only. The other figures are a report of the whole of ``src/namedmesh`` beside the limits
that the project has set itself: ``python tests/project/test_language.py``, which ``.ci/run`` prints.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "namedmesh"

# Words that only the authors of this package would understand, or that are German word for word.
# CONTRIBUTING.md lists the words of the field that take their place.
PRIVATE_WORDS = (
    "a sentence each",
    "alike",
    "apart",
    "beside",
    "cut over",
    "deaf",
    "dialects?",
    "elsewhere",
    "factoring",
    "go on",
    "goes on",
    "going on",
    "hands? out",
    "in peace",
    "in words",
    "is not there",
    "is there",
    "joined",
    "laid out",
    "leave out",
    "left out",
    "manieth",
    "meetings?",
    "outlived",
    "refuse[sd]?",
    "short way",
    "somebody",
    "spread over",
    "stand-ins?",
    "stands? for",
    "strangers?",
    "taken over",
    "told",
    "twin",
    "verdict",
    "whoever",
    "whole ones?",
    "world of one",
)
PATTERNS = {
    "private words": rf"\b(?:{'|'.join(PRIVATE_WORDS)})\b",
    "'what'": r"\bwhat\b",
    "'of which', 'of whose'": r"\bof (?:which|whose|what)\b",
    "'that of', 'those of'": r"\b(?:that|those) of\b",
    "'where'": r"\bwhere\b",
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT_TOKENS = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}

# The most that is allowed. A first line is the summary of a docstring.
LIMITS = {
    "code lines": 11_000,
    "first lines with 'what'": 0,
    "first lines over 88 characters": 0,
    "nested comprehensions": 5,
    # For each 100 code lines:
    "comprehensions": 3,
    "conditional expressions": 2.5,
    "tuple assignments": 0.5,
    "percent of lines over 100 characters": 2,
    # In 1000 words of docstrings and comments:
    "private words": 0.3,
    "'what'": 1,
    "'of which', 'of whose'": 0.4,
    "'that of', 'those of'": 0.3,
    "'where'": 1.6,
}
LEAST_COMMENTS = 7  # for each 100 code lines


@dataclass
class Language:
    """What one or more source files contain.

    Attributes:
        counts: by the name of a row in ``LIMITS``, the number of places; and ``lines``, ``words`` and
            ``comments``.
        places: by the same names, the places themselves.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, place: str) -> None:
        self.counts[name] += 1
        self.places.setdefault(name, []).append(place)

    def figures(self) -> dict[str, float]:
        """Return the figure of each row of ``LIMITS``, and the comments for each 100 code lines."""
        per_code_line = 100 / self.counts["code lines"]
        per_word = 1000 / self.counts["words"]
        figures: dict[str, float] = {"comments": self.counts["comments"] * per_code_line}
        for name in LIMITS:
            figures[name] = self.counts[name]
            if name in PATTERNS:
                figures[name] *= per_word
            elif name in {"comprehensions", "conditional expressions", "tuple assignments"}:
                figures[name] *= per_code_line
            elif name.startswith("percent"):
                figures[name] *= 100 / self.counts["lines"]
        return figures


class Text(NamedTuple):
    """A docstring, or a string that documents a constant."""

    first_line: int
    last_line: int
    text: str


def find_docstrings(tree: ast.Module) -> list[Text]:
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                texts.append(Text(node.lineno, node.end_lineno or node.lineno, text))
    return texts


def count_statements(language: Language, tree: ast.Module, name: str) -> None:
    for node in ast.walk(tree):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, COMPREHENSIONS):
            language.add("comprehensions", place)
            inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
            # The walk starts with the node itself.
            if len(node.generators) > 1 or len(inner) > 1:
                language.add("nested comprehensions", place)
        elif isinstance(node, ast.IfExp):
            language.add("conditional expressions", place)
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            language.add("tuple assignments", place)


def count_words(language: Language, text: str, place: str) -> None:
    language.counts["words"] += len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))
    for name, pattern in PATTERNS.items():
        # A phrase may run over the end of a line.
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            line = text[: match.start()].count("\n")
            language.add(name, f"{place}, line {line + 1} of the text: {match.group()}")


def join_lines(comments: dict[int, str]) -> dict[int, str]:
    """Return the texts of comments that run over several lines, by their first line."""
    joined: dict[int, str] = {}
    first = 0
    for number, text in comments.items():
        if number - 1 in comments:
            joined[first] += f"\n{text}"
        else:
            first = number
            joined[first] = text
    return joined


def count_docstrings(language: Language, tree: ast.Module, name: str) -> set[int]:
    """Count the words of the docstrings, and return the lines that they take."""
    lines: set[int] = set()
    for docstring in find_docstrings(tree):
        place = f"{name}:{docstring.first_line}"
        lines.update(range(docstring.first_line, docstring.last_line + 1))
        count_words(language, docstring.text, place)
        summary = docstring.text.partition("\n")[0]
        if re.search(r"\bwhat\b", summary, re.IGNORECASE):
            language.add("first lines with 'what'", f"{place}: {summary}")
        if len(summary) > 88:
            language.add("first lines over 88 characters", f"{place}: {summary}")
    return lines


def count_tokens(language: Language, source: str, name: str) -> set[int]:
    """Count the words of the comments, and return the lines with tokens that are not comments."""
    lines: set[int] = set()
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            language.counts["comments"] += 1
            # These belong to linters.
            if not re.match(r"# (?:noqa|type):", token.string):
                comments[token.start[0]] = token.string.lstrip("# ")
        elif token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for first, text in join_lines(comments).items():
        count_words(language, text, f"{name}:{first}")
    return lines


def read_language(source: str, name: str, language: Language) -> Language:
    """Add the figures of one source file to ``language``, and return it."""
    tree = ast.parse(source)
    count_statements(language, tree, name)
    docstring_lines = count_docstrings(language, tree, name)
    language.counts["code lines"] += len(count_tokens(language, source, name) - docstring_lines)
    for number, line in enumerate(source.splitlines(), 1):
        language.counts["lines"] += 1
        if len(line) > 100:
            language.add("percent of lines over 100 characters", f"{name}:{number}")
    return language


def read_source() -> Language:
    """Return the figures of the whole of ``src/namedmesh``."""
    total = Language()
    for path in sorted(SOURCE.rglob("*.py")):
        read_language(path.read_text(encoding="utf-8"), str(path.relative_to(SOURCE)), total)
    return total


@pytest.fixture(scope="module")
def language() -> Language:
    return read_source()


def format_table(language: Language) -> str:
    rows = [f"{'comments':48} {language.figures()['comments']:9.2f}   at least {LEAST_COMMENTS}"]
    rows += [f"{name:48} {language.figures()[name]:9.2f}   at most {limit}" for name, limit in LIMITS.items()]
    return "\n".join(rows)


@pytest.mark.ci
def test_no_first_line_is_too_long_or_a_riddle(language: Language) -> None:
    found = {name: language.places.get(name, []) for name, limit in LIMITS.items() if limit == 0}
    assert not any(found.values()), found


EXAMPLE = '''\
"""Return what is beside the mesh.

It is the verdict of those of which each rank was
told where they are.
"""
# A rank that goes
# on alone.
x, y = [[rank for rank in ranks] for ranks in groups], 1 if groups else 2  # noqa: E501  what
PATH = "what is in a string is no text: verdict"
first, second = 1, 2
'''


def test_the_figures_of_an_example() -> None:
    found = read_language(EXAMPLE, "example.py", Language())
    assert found.counts == {
        "lines": 10,
        "code lines": 3,
        "comments": 3,
        "words": 27,
        "first lines with 'what'": 1,
        "private words": 4,
        "'what'": 1,
        "'of which', 'of whose'": 1,
        "'that of', 'those of'": 1,
        "'where'": 1,
        "comprehensions": 2,
        "nested comprehensions": 1,
        "conditional expressions": 1,
        "tuple assignments": 2,
    }
    assert found.places["private words"] == [
        "example.py:1, line 1 of the text: beside",
        "example.py:1, line 3 of the text: verdict",
        "example.py:1, line 4 of the text: told",
        "example.py:6, line 1 of the text: goes\non",
    ]
    assert found.figures()["comments"] == 100
    assert found.figures()["'what'"] == 1000 / 27


def test_a_long_first_line_is_found() -> None:
    found = read_language(f'"""{88 * "x"}"""\n', "short.py", Language())
    read_language(f'"""{89 * "x"}"""\n', "long.py", found)
    assert found.places["first lines over 88 characters"] == [f"long.py:1: {89 * 'x'}"]


if __name__ == "__main__":
    found = read_source()
    print(format_table(found))  # noqa: T201  a report
    for key, most in LIMITS.items():
        if found.figures()[key] > most:
            print(f"\n{key}:", *found.places.get(key, []), sep="\n  ")  # noqa: T201
