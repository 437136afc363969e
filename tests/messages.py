"""What an error says: its whole text where it is made, and a few words of it elsewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from namedmesh.errors import NamedMeshError

if TYPE_CHECKING:
    from collections.abc import Callable


def says(text: str) -> str:
    """A pattern of a whole message, for ``pytest.raises(match=...)``; `` ...`` in it stands for any words."""
    return f"^{re.escape(text)}$".replace(r"\ \.\.\.", r"(?s:.*)")


def refuses(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    """A call that code of a legacy API makes: its error is of the type that such code catches, and one of ours."""
    with pytest.raises(kind, match=says(text)) as caught:
        call()
    assert isinstance(caught.value, NamedMeshError)
