"""The options of process groups: backend, timeout, NCCL settings, a gloo group beside; per axis, or for all."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from namedmesh.errors import LayoutError, MeshError, NamedMeshError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["GroupOptions", "nccl_options", "normalized_backend"]

# The fields of torch's NCCL configuration that a group can set. max_ctas and the like are ints, net_name a string.
_NCCL_FIELDS = (
    "blocking",
    "cga_cluster_size",
    "collnet_enable",
    "cta_policy",
    "max_ctas",
    "min_ctas",
    "net_name",
    "nvls_ctas",
    "split_share",
    "traffic_class",
)
# Megatron's file has one switch that is a field of the options, not of the NCCL configuration.
_HIGH_PRIORITY = "is_high_priority_stream"


_LONGEST = timedelta(days=366)  # torch counts in nanoseconds, and overflows


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of the process groups over an axis, and of every group derived from that axis.

    Args:
        backend: the backend, as ``new_group`` takes it; by default that of the default group.
        timeout: how long a collective may take; by default that of the default group.
        nccl: settings of the NCCL communicator by name, such as ``{"max_ctas": 32}``. Backends other than
            NCCL have no use for them.
        high_priority: run NCCL's kernels on a stream of high priority.
        gloo_twin: also make a gloo group over the same ranks, for tensors on the CPU.
        share: whether the group may be the same object as another one over the same ranks with the same
            options. Turn it off for code that overlaps two collectives over the same ranks.

    Raises:
        LayoutError: a setting that NCCL does not have, a timeout that is not positive, or a backend that is no
            string; all problems at once.

    Example:
        >>> GroupOptions(nccl={"max_ctas": 32}, high_priority=True).nccl
        (('max_ctas', 32),)
    """

    backend: str | None = None
    timeout: timedelta | None = None
    nccl: Mapping[str, int | str] | tuple[tuple[str, int | str], ...] = ()
    high_priority: bool = False
    gloo_twin: bool = False
    share: bool = True

    def __post_init__(self) -> None:
        settings: dict[str, int | str] = {}
        problems = []
        try:
            settings = dict(self.nccl)
        except (TypeError, ValueError):
            problems.append(f"nccl is {self.nccl!r}; it maps settings to values, as in {{'max_ctas': 32}}")
        problems += [
            f"NCCL has no setting {name!r} that a group can give; the settings are {', '.join(_NCCL_FIELDS)}"
            f"{did_you_mean(name, _NCCL_FIELDS)}"
            for name in settings
            if name not in _NCCL_FIELDS
        ]
        backend: object = self.backend
        if backend is not None and not isinstance(backend, str):
            problems.append(f"backend is {backend!r}; it is a name such as 'gloo'")
        timeout: object = self.timeout
        if timeout is not None and (
            not isinstance(timeout, timedelta) or not timedelta(0) < timeout <= _LONGEST
        ):
            problems.append(
                f"timeout is {timeout!r}; it is a datetime.timedelta longer than nothing and of at most a year"
            )
        if problems:
            raise LayoutError(*problems)
        object.__setattr__(self, "nccl", tuple(sorted(settings.items())))

    @classmethod
    def from_yaml(cls, path: str | Path) -> dict[str, GroupOptions]:
        """Return options by axis, from a YAML file in the format of Megatron's ``--nccl-communicator-config-path``.

        The file maps the name of an axis to NCCL settings and ``is_high_priority_stream``::

            tp:
              max_ctas: 32
              is_high_priority_stream: true

        Raises:
            NamedMeshError: PyYAML is not installed.
            LayoutError: the file is not there or does not hold such a mapping; all problems at once.
        """
        options, problems = {}, []
        for axis, settings in _read_yaml(path).items():
            try:
                options[axis] = cls.from_settings(settings)
            except LayoutError as error:  # noqa: PERF203  all problems at once
                problems += [f"{path}, {axis}: {problem}" for problem in error.problems]
        if problems:
            raise LayoutError(*problems)
        return options

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> GroupOptions:
        """Return the options that settings in the spelling of such a file stand for.

        Raises:
            LayoutError: a setting that NCCL does not have.

        Example:
            >>> GroupOptions.from_settings({"max_ctas": 32, "is_high_priority_stream": True})
            GroupOptions(nccl=(('max_ctas', 32),), high_priority=True)
        """
        nccl = {name: value for name, value in settings.items() if name != _HIGH_PRIORITY}
        return cls(nccl=nccl, high_priority=bool(settings.get(_HIGH_PRIORITY, False)))

    def combined(self, other: GroupOptions, axes: str) -> GroupOptions:
        """Return the options of a group over two axes: what either sets, provided they do not contradict.

        Args:
            other: the options of the other axis.
            axes: the names of both, for the message.

        Raises:
            LayoutError: both set something, and differently.

        Example:
            >>> slow = GroupOptions(timeout=timedelta(hours=1))
            >>> GroupOptions(backend="gloo").combined(slow, "dp and cp")
            GroupOptions(backend='gloo', timeout=datetime.timedelta(seconds=3600))
        """
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

    def __repr__(self) -> str:
        """Return only what was set: the text is compared between ranks and shown in messages."""
        options = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                options.append(f"{field.name}={value!r}")
        return f"GroupOptions({', '.join(options)})"


def _read_yaml(path: str | Path) -> dict[str, dict[str, Any]]:
    try:
        import yaml  # a file of options is rare: who has one installs the reader
    except ImportError:
        raise NamedMeshError(
            "options from a YAML file need PyYAML; install it with: pip install PyYAML"
        ) from None
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123  a str is as good as a Path here
            table = yaml.safe_load(file)
    except OSError as error:
        raise LayoutError(f"the options file {str(path)!r} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise LayoutError(f"the options file {str(path)!r} is not YAML: {error}") from None
    if isinstance(table, dict) and all(
        isinstance(axis, str) and isinstance(settings, dict) for axis, settings in table.items()
    ):
        return table
    raise LayoutError(
        f"the options file {str(path)!r} must map names of axes to settings, such as 'tp: {{max_ctas: 32}}'"
    )


def normalized_backend(backend: str | None) -> dict[str, str]:
    """Return which backend serves which type of device, as torch reads the name of one, or of several.

    Two names that mean the same give equal answers, so groups can be shared whatever the spelling, and
    ``normalized_backend(name).get("cuda") == "nccl"`` says whether NCCL options apply there.

    Args:
        backend: a name as ``new_group`` and ``init_process_group`` take it, such as ``"nccl"``, ``"NCCL"`` or
            ``"cpu:gloo,cuda:nccl"``; None or ``"undefined"``, which is what a group made without a name
            reports, for the backend that torch chooses.

    Raises:
        LayoutError: a name that torch does not know, or a device that is named twice.

    Example:
        >>> normalized_backend("CPU:gloo,cuda:NCCL") == normalized_backend("cuda:nccl,cpu:gloo")
        True
        >>> normalized_backend("NCCL")
        {'cuda': 'nccl'}
    """
    import torch  # options themselves need no torch
    import torch.distributed as dist

    default = dist.Backend.default_device_backend_map
    name = (backend or dist.Backend.UNDEFINED).lower()
    if name == dist.Backend.UNDEFINED:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator is not None else "cpu"
        return {kind: default[kind]} if kind in default else {}
    if ":" not in name:
        kinds: Sequence[str] = dist.Backend.backend_capability.get(name, ["cpu", "cuda", "xpu"])
        named = dict.fromkeys(kinds, name)
    else:
        pairs = [pair.partition(":")[::2] for pair in name.split(",")]
        kinds, named = [kind for kind, _ in pairs], dict(pairs)
    known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    problems = [
        f"backend {backend!r} names {which!r}, which is none that torch knows; the backends are "
        f"{', '.join(known)}, or one for each type of device such as 'cpu:gloo,cuda:nccl'{did_you_mean(which, known)}"
        for which in dict.fromkeys(named.values())
        if which not in known
    ]
    problems += [
        f"backend {backend!r} names device type {kind!r} {kinds.count(kind)} times; name each one once"
        for kind in named
        if kinds.count(kind) > 1
    ]
    if problems:
        raise LayoutError(*problems)
    return dict(sorted(named.items()))


def nccl_options(options: GroupOptions, timeout: timedelta | None = None) -> object:
    """Return what ``new_group`` takes as ``pg_options`` for NCCL.

    Raises:
        MeshError: this torch was built without NCCL.
    """
    import torch.distributed as dist  # options themselves need no torch

    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise MeshError(
            "this torch was built without NCCL, so there are no NCCL options; use another backend"
        )
    made: Any = nccl.Options(is_high_priority_stream=options.high_priority)
    if timeout is not None:
        made._timeout = timeout  # noqa: SLF001  torch's own spelling, also in its documentation
    for name, value in dict(options.nccl).items():
        setattr(made.config, name, value)
    return made
