"""What an error says: its whole text where it is made, and a few words of it elsewhere; and what a command prints."""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING, TypeVar

import pytest

from namedmesh.errors import NamedMeshError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def says(text: str) -> str:
    """A pattern of a whole message, for ``pytest.raises(match=...)``; `` ...`` in it stands for any words."""
    return f"^{re.escape(text)}$".replace(r"\ \.\.\.", r"(?s:.*)")


def refuses(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    """A call that code of a legacy API makes: its error is of the type that such code catches, and one of ours."""
    with pytest.raises(kind, match=says(text)) as caught:
        call()
    assert isinstance(caught.value, NamedMeshError)


def error_of(call: Callable[[], object]) -> str:
    """The type and the text of the error of ours that a call ends in; nothing where it ends in none."""
    try:
        call()
    except NamedMeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def problems_of(call: Callable[[], object]) -> list[str]:
    """The sentences of the error of ours that a call ends in, one for each problem."""
    try:
        call()
    except NamedMeshError as error:
        return list(error.problems)
    return []


def printed_by(call: Callable[[], T]) -> tuple[T, str, str]:
    """What a call returns, what it prints, and what it prints as errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        result = call()
    return result, out.getvalue(), err.getvalue()
