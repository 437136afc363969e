"""Options of process groups, and the arguments of torch that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from namedmesh._errors import AxisError, MeshError, OptionError
from namedmesh.launch.default_group import check_timeout
from namedmesh.layout.sizes import suggest_axis


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of the process groups over an axis, alone or together with other axes.

    Args:
        backend: the backend, as ``new_group`` takes it; by default the backend of the default
            group.
        timeout: the timeout of collectives; by default the timeout of the default group.
        nccl: settings of the NCCL communicator by name, such as ``{"max_ctas": 32}``; with NCCL
            only.
        high_priority: run the kernels of NCCL on a high-priority stream.
        create_gloo_group: create an additional gloo group over the same ranks, for tensors on the
            CPU.
        share: whether a group over the same ranks with the same options is reused. Turn it off for
            code that runs two collectives over the same ranks at the same time.

    Raises:
        OptionError: the timeout is not positive, or the backend is not a string.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    nccl: Mapping[str, int | str] | tuple[tuple[str, int | str], ...] = ()
    high_priority: bool = False
    create_gloo_group: bool = False
    share: bool = True

    def __post_init__(self) -> None:
        problems = []
        backend: object = self.backend
        if backend is not None and not isinstance(backend, str):
            problems.append(f"backend must be a name such as 'gloo', got {backend!r}")
        problems += check_timeout(self.timeout)
        settings: dict[str, int | str] = {}
        try:
            settings = dict(self.nccl)
        except (TypeError, ValueError):
            problems.append(f"nccl must be a mapping of names to values, got {self.nccl!r}")
        if problems:
            raise OptionError(*problems)
        # Options are keys of dictionaries. A sorted tuple is hashable, and the same in whatever
        # order the settings were given.
        object.__setattr__(self, "nccl", tuple(sorted(settings.items())))

    def __repr__(self) -> str:
        # The text is compared between ranks and shown in messages. It names only the options that
        # are set.
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        arguments = [f"{name}={getattr(self, name)!r}" for name in changed]
        return f"GroupOptions({', '.join(arguments)})"


def merge_options(first: GroupOptions, second: GroupOptions, axes: str) -> GroupOptions:
    """Return the options that either sets, for a group over the axes of both.

    Args:
        first: the options of one axis.
        second: the options of another axis.
        axes: both axes, as the error names them.

    Raises:
        OptionError: both set an option to different values.
    """
    problems = []
    changes: dict[str, Any] = {}
    for field in fields(GroupOptions):
        first_value = getattr(first, field.name)
        second_value = getattr(second, field.name)
        if second_value in (first_value, field.default):
            # The first value holds. A default is the absence of a value, so it contradicts none.
            continue
        if first_value != field.default:
            problems.append(
                f"axes {axes} set different values of {field.name}, {first_value!r} and "
                f"{second_value!r}; set the one of the group over both with options="
            )
        changes[field.name] = second_value
    if problems:
        raise OptionError(*problems)
    return replace(first, **changes)


def make_group_arguments(options: GroupOptions) -> dict[str, Any]:
    """Return the keyword arguments of torch's ``new_group`` for groups with these options.

    Args:
        options: the merged options of the axes of the group.

    Raises:
        OptionError: settings of NCCL for a group without NCCL, or a setting that NCCL does not
            have.
    """
    arguments: dict[str, Any] = {"timeout": options.timeout}
    if options.backend is not None:
        arguments["backend"] = options.backend
    nccl_options = _find_nccl_options(options)
    if nccl_options is not None:
        arguments["pg_options"] = nccl_options
    return arguments


def make_backend_override(options: GroupOptions) -> tuple[str, Any] | None:
    """Return the ``backend_override`` of ``init_device_mesh`` for an axis with these options.

    Args:
        options: the options of the axis.

    Returns:
        The backend and its options, or None if torch cannot express the options there: for a
        backend other than "nccl" and "gloo", such as "cpu:gloo,cuda:nccl".

    Raises:
        OptionError: settings of NCCL for a group without NCCL, or a setting that NCCL does not
            have.
    """
    _find_nccl_options(options)
    backend = options.backend or dist.get_backend()
    if backend == "nccl":
        return backend, make_nccl_options(options)
    if backend == "gloo":
        gloo_options: Any = dist.ProcessGroupGloo.Options
        return backend, gloo_options(backend, options.timeout)
    return None


def _find_nccl_options(options: GroupOptions) -> object:
    """Return the NCCL options that were set; None if there are none.

    Raises:
        OptionError: the backend of the group is not NCCL.
    """
    if not options.nccl and not options.high_priority:
        return None
    # get_backend() may return "undefined" for the default group: torch then chose one for each
    # device type.
    backend = (options.backend or dist.get_backend_config()).lower()
    if "nccl" in backend:
        return make_nccl_options(options)
    if "fake" in backend:
        # torch's fake backend simulates any other backend, without the hardware.
        return None
    raise OptionError(
        f"nccl={dict(options.nccl)} and high_priority={options.high_priority} are settings of "
        f"NCCL, but the groups use the backend {backend!r}; omit them, or choose a backend with "
        "NCCL, such as backend='nccl'"
    )


def make_nccl_options(options: GroupOptions) -> object:
    """Return the ``pg_options`` of ``new_group`` for a group with the NCCL backend.

    Args:
        options: the merged options of the axes of the group.

    Raises:
        OptionError: a setting that NCCL does not have.
        MeshError: torch was built without NCCL.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise MeshError(
            "this torch was built without NCCL, so there are no NCCL options; use another backend"
        )
    nccl_options: Any = nccl.Options(is_high_priority_stream=options.high_priority)
    if options.timeout is not None:
        # torch's documentation sets the private attribute, too: there is no public one.
        nccl_options._timeout = options.timeout  # noqa: SLF001
    for name, value in dict(options.nccl).items():
        if not hasattr(nccl_options.config, name):
            raise OptionError(f"NCCL has no setting {name!r}; see torch's ProcessGroupNCCL.NCCLConfig")
        setattr(nccl_options.config, name, value)
    return nccl_options


def split_flattened_name(name: str, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes in a flattened name, such as ``dp_cp``; empty if it is not one.

    Args:
        name: the name of an axis, or of a flattened axis.
        axes: the axes that may occur in it, in their order.

    Example:
        >>> split_flattened_name("dp_tp", ("dp", "cp", "tp"))
        ('dp', 'tp')
        >>> split_flattened_name("dp_shard_cp", ("dp", "dp_shard", "cp"))  # not "dp" and "shard_cp"
        ('dp_shard', 'cp')
    """
    for index, axis in enumerate(axes):
        if name == axis:
            return (axis,)
        if name.startswith(f"{axis}_"):
            rest = split_flattened_name(name.removeprefix(f"{axis}_"), axes[index + 1 :])
            if rest:
                return (axis, *rest)
    return ()


def find_options_by_axes(
    options: Mapping[str, GroupOptions], axes: Sequence[str]
) -> dict[tuple[str, ...], GroupOptions]:
    """Return the options of groups by their axes, as tuples instead of flattened names.

    Args:
        options: by the name of an axis, or by a flattened name such as ``dp_cp``.
        axes: the axes that are created now.

    Raises:
        AxisError: options for axes that are not created; all problems at once.
        OptionError: options that are not ``GroupOptions``; all problems at once.
    """
    # A type checker believes the annotation. Users who pass something else get an error all the
    # same.
    argument: object = options
    if not isinstance(argument, Mapping):
        raise OptionError(
            f"options must be a mapping of axis names to GroupOptions, got {argument!r}; name the "
            'axes, such as options={"tp": GroupOptions(...)}'
        )
    by_axes: dict[tuple[str, ...], GroupOptions] = {}
    problems = []
    unknown = []
    for name, group_options in options.items():
        named = split_flattened_name(str(name), axes)
        by_axes[named or (name,)] = group_options
        problems += check_options(group_options, f"options of axis {name!r}")
        if not named:
            suggestion = suggest_axis(name, axes)
            unknown.append(
                f"options are given for axis {name!r}, which is not one of {tuple(axes)}{suggestion}"
            )
    # An error has one type. If there are problems of both kinds, OptionError carries all of them.
    if problems:
        raise OptionError(*problems, *unknown)
    if unknown:
        raise AxisError(*unknown)
    return by_axes


def check_options(options: object, argument: str) -> list[str]:
    """Return a message if an argument is not :class:`GroupOptions` (an empty list if it is).

    Args:
        options: the object to check.
        argument: its description, for the message.
    """
    if isinstance(options, GroupOptions):
        return []
    return [f"{argument} must be GroupOptions, got {options!r}; write GroupOptions(timeout=...)"]
