"""What an error says: its whole text where it is made, and a few words of it elsewhere."""

from __future__ import annotations

import re


def says(text: str) -> str:
    """A pattern of a whole message, for ``pytest.raises(match=...)``; `` ...`` in it stands for any words."""
    return f"^{re.escape(text)}$".replace(r"\ \.\.\.", r"(?s:.*)")
