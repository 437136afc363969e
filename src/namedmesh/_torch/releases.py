"""The installed release of torch."""

from __future__ import annotations

from functools import cache

import torch
from packaging.version import Version


def torch_is_at_least(release: str) -> bool:
    """Return whether the installed torch is of a release or a newer one.

    Pre-releases count as the release: 2.15.0.dev1 is at least 2.15.

    Args:
        release: major and minor version, such as ``"2.15"``.
    """
    return _parse(torch.__version__) >= _parse(release)


# The version is parsed once. It is read at each call, as tests simulate other releases.
@cache
def _parse(version: str) -> tuple[int, ...]:
    return Version(version).release
