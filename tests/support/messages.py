"""Compare the messages of errors and the output of commands.

A test of the code that raises an error compares the full message; other tests compare a few words.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING, TypeVar

import pytest

from namedmesh._errors import NamedMeshError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def match_message(text: str) -> str:
    """Return a pattern for ``pytest.raises(match=...)`` that matches the full message.

    `` ...`` in the text matches any words.
    """
    return f"^{re.escape(text)}$".replace(r"\ \.\.\.", r"(?s:.*)")


def check_error(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    """Check that a call raises a NamedMeshError of the type that legacy code catches."""
    with pytest.raises(kind, match=match_message(text)) as caught:
        call()
    assert isinstance(caught.value, NamedMeshError)


def error_of(call: Callable[[], object]) -> str:
    """Return the type and message of the NamedMeshError that a call raises, or an empty text."""
    try:
        call()
    except NamedMeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def list_problems(call: Callable[[], object]) -> list[str]:
    """Return the problems of the NamedMeshError that a call raises."""
    try:
        call()
    except NamedMeshError as error:
        return list(error.problems)
    return []


def capture_printed(call: Callable[[], T]) -> tuple[T, str, str]:
    """Return the result of a call, its output, and its error output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        result = call()
    return result, out.getvalue(), err.getvalue()
