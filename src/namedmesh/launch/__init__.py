"""Start a job: from the environment to a default process group that all ranks agree on.

It imports ``namedmesh.layout``, ``namedmesh._torch`` and ``namedmesh._errors``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from namedmesh.launch.default_group import init
else:

    def __getattr__(name: str) -> object:
        # The tables of this room are read without torch, which the default group needs.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from namedmesh.launch import default_group

        return getattr(default_group, name)


__all__ = ["init"]
