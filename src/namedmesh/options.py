"""The options of process groups: backend, timeout, NCCL settings, a gloo group beside; per axis, or for all."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from namedmesh.errors import LayoutError, MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of the process groups over an axis, and of every group derived from that axis.

    Args:
        backend: the backend, as ``new_group`` takes it; by default that of the default group.
        timeout: how long a collective may take; by default that of the default group.
        nccl: settings of the NCCL communicator by name, such as ``{"max_ctas": 32}``; for NCCL only.
        high_priority: run NCCL's kernels on a stream of high priority.
        gloo_twin: also make a gloo group over the same ranks, for tensors on the CPU.
        share: whether the group may be the same object as another one over the same ranks with the same
            options. Turn it off for code that overlaps two collectives over the same ranks.

    Raises:
        LayoutError: a timeout that is not positive, or a backend that is no string.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    nccl: Mapping[str, int | str] | tuple[tuple[str, int | str], ...] = ()
    high_priority: bool = False
    gloo_twin: bool = False
    share: bool = True

    def __post_init__(self) -> None:
        problems = []
        backend: object = self.backend
        if backend is not None and not isinstance(backend, str):
            problems.append(f"backend is {backend!r}; it is a name such as 'gloo'")
        timeout: object = self.timeout
        if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
            problems.append(f"timeout is {timeout!r}; it is a datetime.timedelta longer than nothing")
        if problems:
            raise LayoutError(*problems)
        object.__setattr__(self, "nccl", tuple(sorted(dict(self.nccl).items())))

    def combined(self, other: GroupOptions, axes: str) -> GroupOptions:
        """Return what either sets, for a group over two ``axes``; LayoutError where they contradict."""
        problems = []
        changes: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if theirs in (mine, field.default):
                continue
            if mine != field.default:
                problems.append(
                    f"{field.name} of axes {axes} is both {mine!r} and {theirs!r}; say which one the group over both "
                    "should have with options="
                )
            changes[field.name] = theirs
        if problems:
            raise LayoutError(*problems)
        return replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        """Return the keywords with which torch makes groups of these options."""
        import torch.distributed as dist

        arguments: dict[str, Any] = {"timeout": self.timeout}
        if self.backend is not None:
            arguments["backend"] = self.backend
        if (self.nccl or self.high_priority) and "nccl" in (self.backend or dist.get_backend()):
            arguments["pg_options"] = nccl_options(self)
        return arguments

    def override(self) -> tuple[str, Any] | None:
        """Return what ``init_device_mesh`` takes for an axis as ``backend_override``; None where it has no words for it."""
        import torch.distributed as dist

        backend = self.backend or dist.get_backend()
        if backend == "nccl":
            return backend, nccl_options(self)
        if backend == "gloo":
            options: Any = dist.ProcessGroupGloo.Options
            return backend, options(backend, self.timeout)
        return None

    def __repr__(self) -> str:
        """Return only what was set: the text is compared between ranks and shown in messages."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = [
            f"{field.name}={values[field.name]!r}"
            for field in fields(self)
            if values[field.name] != field.default
        ]
        return f"GroupOptions({', '.join(given)})"


def nccl_options(options: GroupOptions) -> object:
    """Return what ``new_group`` takes as ``pg_options`` for NCCL; LayoutError for a setting that it does not have."""
    import torch.distributed as dist

    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise MeshError(
            "this torch was built without NCCL, so there are no NCCL options; use another backend"
        )
    made: Any = nccl.Options(is_high_priority_stream=options.high_priority)
    if options.timeout is not None:
        made._timeout = options.timeout  # noqa: SLF001  torch's own spelling, also in its documentation
    for name, value in dict(options.nccl).items():
        if not hasattr(made.config, name):
            raise LayoutError(f"NCCL has no setting {name!r}; see torch's ProcessGroupNCCL.NCCLConfig")
        setattr(made.config, name, value)
    return made
