"""Which release of megatron-core the dialect answers as, where two of them disagree.

Release 0.19 has other positional arguments than the releases before it, and answers of its own.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable

_NEWEST = (0, 19)
_watchers: list[Callable[[], None]] = []


def _parsed(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    if not all(part.isdigit() for part in parts):
        raise ContractError(
            f"{version!r} is no version of megatron-core; give one such as '0.16.1' or '0.19'"
        )
    return tuple(int(part) for part in parts)


def _installed() -> tuple[int, ...]:
    try:
        return _parsed(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        return _NEWEST


_selected = _installed()


def newest() -> bool:
    """Return whether the dialect answers as release 0.19 or later."""
    return _selected >= _NEWEST


def select(version: str | None = None) -> None:
    """Answer as a release of megatron-core, where two of them disagree.

    Select it before other code imports the accessors: one that is imported by name keeps its arguments.

    Args:
        version: the release, such as ``"0.16.1"``; by default the one that is installed, or else the newest.

    Raises:
        ContractError: it is no version.
    """
    global _selected  # noqa: PLW0603  one answer for the process, as for the original
    _selected = _installed() if version is None else _parsed(version)
    for watcher in _watchers:
        watcher()


def on_change(watcher: Callable[[], None]) -> None:
    """Call a function now, and whenever another release is selected."""
    _watchers.append(watcher)
    watcher()
