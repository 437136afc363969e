"""``namedmesh doctor``: check every group of a layout, and measure each axis.

It runs under torchrun, on the ranks of a real job. Rank 0 prints the measurements of all ranks. A
problem is printed by every rank, whose exit status is then 1. torch is imported when the command
runs. ``--report`` only describes the job and its software, and waits for nobody.

The ranks report to each other through the store of the job: a collective would hang together with
the groups that are checked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import re
import socket
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh._command_line import float_between
from namedmesh._errors import (
    AgreementError,
    NamedMeshError,
    format_count,
    format_items,
    format_ranks,
    get_first_line,
)
from namedmesh._version import __version__
from namedmesh.layout import Layout
from namedmesh.tools.plan.describe import make_plan
from namedmesh.tools.plan.spec import (
    add_layout_arguments,
    format_table,
    make_layouts,
    parse_spec,
    read_layout_arguments,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# A measurement is the median of several rounds. Before them, connections and caches are warmed up.
_WARM_UP_ROUNDS = 3
_MEASURED_ROUNDS = 9
# The settings of a report. They say how ranks communicate, and hold no secrets.
_SETTINGS = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|TORCH_DISTRIBUTED|OMP_NUM|CUDA_VISIBLE|HIP_VISIBLE)_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)

_REMEDY = (
    "check the output of each rank with NCCL_DEBUG=INFO, and that NCCL_SOCKET_IFNAME (with gloo "
    "GLOO_SOCKET_IFNAME) names the network interface that connects the hosts"
)


class Problem(NamedTuple):
    """A problem that one rank found.

    Attributes:
        axis: the axis of the group; ``"world"`` for the default group.
        message: the message, without the axis and the rank.
    """

    axis: str
    message: str


class CheckedGroup(NamedTuple):
    """A group to check.

    Attributes:
        axis: the axis of the group; ``"world"`` for the default group.
        ranks: the global ranks that should be its members.
        group: the group.
    """

    axis: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


class AxisSpeed(NamedTuple):
    """The speed of one group.

    Attributes:
        ranks: the global ranks of the group.
        latency: the time of an all-reduce of one number, in seconds.
        bandwidth: the bytes that a large all-reduce sends over each link, per second.
    """

    ranks: Sequence[int]
    latency: float
    bandwidth: float


class Measurements(NamedTuple):
    """The measurements of one rank.

    Attributes:
        rank: the rank.
        local_seconds: the time of a matrix product on this rank, without communication.
        axes: by axis, the fields of :class:`AxisSpeed` for this rank's group.
    """

    rank: int
    local_seconds: float
    axes: Mapping[str, Sequence[Any]]


def _configure(parser: ArgumentParser) -> None:
    add_layout_arguments(parser)
    text = "seconds to wait for a rank, or for the communicator and the collectives of a group (default: 60)"
    parser.add_argument("--timeout", type=float_between(0.1, 1e6), default=60.0, metavar="S", help=text)
    text = "cpu, cuda, or one device (default: the accelerator that torch finds)"
    parser.add_argument("--device", help=text)
    text = "size of the large all-reduce (default: 4, on a GPU 64)"
    parser.add_argument("--megabytes", type=float_between(0.001, 1024), metavar="M", help=text)
    text = "for an issue: print versions, launcher, layout, groups and settings, and check nothing"
    parser.add_argument("--report", action="store_true", help=text)


def _run(arguments: Namespace) -> tuple[int, str]:
    """Check and measure the groups on every rank of the job.

    Returns:
        The exit status, and on rank 0 the measurements of all ranks.

    Raises:
        AgreementError: the problems of all ranks.
    """
    import torch.distributed as dist

    from namedmesh import launch
    from namedmesh._torch.groups import set_group_timeout
    from namedmesh.launch.coordinator import exchange_values

    spec, sizes = read_layout_arguments(arguments)
    # A specification that cannot be parsed raises here, before the ranks wait for each other.
    parse_spec(spec)
    if arguments.report:
        return 0, _format_report(spec, sizes)
    timeout = timedelta(seconds=arguments.timeout)
    problems: list[Any] = []
    try:
        device = launch.init(arguments.device, timeout=timeout)
        # The collectives run in a thread with a time limit. NCCL's own timeout, which ends the
        # process, must be longer. The groups of the mesh inherit it.
        set_group_timeout(3 * timeout, None)
        job = make_layouts(spec, world_size=dist.get_world_size(), **sizes)
        groups = _make_groups(job.dense, job.expert, device)
        # A rank that is stuck reports after one time limit, and may have started one limit later.
        exchange = partial(exchange_values, timeout=3 * timeout)
        silent = Problem("world", "it did not report; read its output first")
        problems = exchange("problem", check_groups(groups, device, timeout), silent)
        if any(problems):
            # The destructors of the groups, and a thread that hangs in one, would keep the process
            # from its end. The problems are printed before it.
            atexit.register(os._exit, 1)
            raise AgreementError(*format_problems([problem and Problem(*problem) for problem in problems]))
        megabytes = arguments.megabytes or (4 if device.type == "cpu" else 64)
        reports = exchange("speed", (socket.gethostname(), measure(groups, device, round(megabytes * 2**20))))
        if dist.get_rank() > 0:
            return 0, ""
        hosts = set()
        by_rank = []
        for host, values in filter(None, reports):
            hosts.add(host)
            by_rank.append(Measurements(*values))
        head = f"{job.dense}, {dist.get_backend()} on {device.type}, {format_count(len(hosts), 'host')}"
        return 0, f"{head}\n\n{format_measurements(by_rank)}\n"
    except RuntimeError as error:
        if isinstance(error, NamedMeshError):
            raise
        # torch's, about a connection: only its first line is a message for users.
        raise AgreementError(get_first_line(error)) from None
    finally:
        if dist.is_initialized() and not any(problems):
            dist.destroy_process_group()


def _format_report(spec: str, sizes: Mapping[str, Any]) -> str:
    """Describe the software, the launcher, the layout and the settings of this process."""
    import torch

    from namedmesh.launch.launchers import find_launcher, make_torchrun_variables
    from namedmesh.launch.tested_releases import TESTED_RELEASES

    environment = os.environ | make_torchrun_variables(os.environ)
    if environment.get("RANK", "0") != "0":
        return ""
    number = environment.get("WORLD_SIZE", "" if spec or sizes else "1")
    plan = make_plan(spec, world_size=int(number) if number.isdecimal() else None, **sizes)
    lines = [f"namedmesh {__version__}", f"Python {platform.python_version()} on {platform.platform()}"]
    for release in TESTED_RELEASES.values():
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{release.package} {metadata.version(release.package)}")
    # A build for CUDA names the accelerator also without a device or a driver, as on a login node.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        lines.append(f"{module.device_count()} x {module.get_device_name()}, CUDA {torch.version.cuda}")
        if accelerator.type == "cuda":
            lines.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    lines.append(f"launcher: {find_launcher(environment) or 'none'}")
    for name in sorted(environment):
        if _SETTINGS.match(name):
            lines.append(f"{name}={environment[name]}")
    return "\n".join([*lines, "", str(plan)]) + "\n"


def _make_groups(layout: Layout, expert_layout: Layout | None, device: torch.device) -> list[CheckedGroup]:
    """Create the mesh of a job; list the default group and the group of each axis to check."""
    import torch.distributed as dist

    from namedmesh.mesh.init import init_mesh

    mesh = init_mesh(layout, device=device.type)
    axes = list(layout)
    if expert_layout is not None:
        mesh.add_view("expert", **dict[str, Any](expert_layout.items()))
        # The views share axes such as pp, whose groups are checked once.
        axes += expert_layout
    groups = []
    for axis in dict.fromkeys(axes):
        if mesh.size(axis) > 1:
            groups.append(CheckedGroup(axis, mesh.ranks(axis), mesh.group(axis)))
    world = tuple(range(dist.get_world_size()))
    groups.append(CheckedGroup("world", world, dist.group.WORLD))
    return groups


def format_problems(problems: Sequence[Problem | None]) -> list[str]:
    """Return a message for each problem, with all ranks that found it.

    Args:
        problems: by rank, its problem; None for a rank without one.
    """
    ranks_by_problem: dict[Problem, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            ranks_by_problem.setdefault(problem, []).append(rank)
    messages = []
    for problem, ranks in ranks_by_problem.items():
        messages.append(f"axis {problem.axis}, {format_ranks(ranks)}: {problem.message}")
    return messages


def check_groups(groups: Sequence[CheckedGroup], device: torch.device, timeout: timedelta) -> Problem | None:
    """Check that each group has the expected members, and that its all-reduce is correct.

    Collective: every rank must call it with its groups over the same axes.

    Args:
        groups: the groups of this rank.
        device: the device of the tensors.
        timeout: how long to wait for the communicator and the collectives of a group.

    Returns:
        The first problem; None if there is none. The groups after it are not checked, as their
        collectives could wait for a rank that has stopped here.
    """
    from namedmesh.launch.agreement import call_in_thread

    for group in groups:
        steps: list[str] = []
        # NCCL creates a communicator in the call of the first collective, where no timeout of torch
        # applies. A wrong network interface makes it wait there.
        outcome = call_in_thread(partial(_check_group, group, device, steps.append), timeout)
        if outcome is None:
            message = f"{steps[-1]} did not end within {timeout.total_seconds():g} s; {_REMEDY}"
        else:
            message = outcome()
        if message:
            return Problem(group.axis, message)
    return None


def _check_group(group: CheckedGroup, device: torch.device, report_step: Callable[[str], None]) -> str:
    """Check the members of a group and its all-reduce.

    Args:
        group: the group.
        device: the device of the tensors.
        report_step: a function that is told each operation before the check waits for it.

    Returns:
        The message about a problem; empty if there is none.
    """
    import torch
    import torch.distributed as dist

    report_step("the creation of its communicator")
    try:
        if device.index is not None:
            # The current device belongs to a thread.
            torch.accelerator.set_device_index(device.index)
        rank = torch.tensor([dist.get_rank()], device=device)
        # The all-gather comes first: its result names the members of a wrong group.
        gathered = [torch.empty_like(rank) for _ in range(dist.get_world_size(group.group))]
        work: Any = dist.all_gather(gathered, rank, group=group.group, async_op=True)
        report_step("its first all-gather")
        work.wait()
        members = tuple(int(member.item()) for member in gathered)
        if members != group.ranks:
            ranks = f"{format_items(members)} instead of {format_items(group.ranks)}"
            return f"its group has ranks {ranks}"
        report_step("its first all-reduce")
        dist.all_reduce(rank, group=group.group)
        total = int(rank.item())
    except RuntimeError as error:
        return f"{get_first_line(error)}; {_REMEDY}"
    expected = sum(group.ranks)
    return "" if total == expected else f"an all-reduce gave {total} instead of {expected}"


def measure(groups: Sequence[CheckedGroup], device: torch.device, num_bytes: int) -> Measurements:
    """Measure a matrix product, and the all-reduces of each group.

    Collective: every rank must call it with its groups over the same axes.

    Args:
        groups: the groups of this rank.
        device: the device of the tensors.
        num_bytes: the size of the large all-reduce.

    Returns:
        The measurements of this rank.
    """
    import torch
    import torch.distributed as dist

    matrix = torch.ones(2 * [256 if device.type == "cpu" else 4096], device=device)
    small = torch.zeros(1, device=device)
    large = torch.zeros(max(1, num_bytes // 4), device=device)

    def time_call(call: Callable[[], object]) -> float:
        times = []
        for _ in range(_WARM_UP_ROUNDS + _MEASURED_ROUNDS):
            start = time.perf_counter()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[_WARM_UP_ROUNDS:])

    # A slow rank must not look like a slow link, so it is measured without communication, too.
    local_seconds = time_call(lambda: matrix @ matrix)
    axes = {}
    for axis, ranks, group in groups:
        latency = time_call(partial(dist.all_reduce, small, group=group))
        seconds = time_call(partial(dist.all_reduce, large, group=group))
        # In a ring, each link carries 2 (n - 1) / n times the bytes of an all-reduce. nccl-tests
        # computes its "busbw" like that, too, whichever algorithm runs.
        bytes_per_link = 2 * (len(ranks) - 1) / len(ranks) * num_bytes
        axes[axis] = AxisSpeed(ranks, latency, bytes_per_link / seconds)
    return Measurements(dist.get_rank(), local_seconds, axes)


def format_measurements(by_rank: Sequence[Measurements]) -> str:
    """Format the measurements of all ranks.

    Args:
        by_rank: the measurements of each rank, on the same axes.

    Returns:
        A table with a row for each axis, and the slowest rank.
    """
    columns = ("axis", "size", "groups", "latency us", "GB/s", "slowest group", "its GB/s")
    rows = []
    for axis in by_rank[0].axes:
        # Every rank of a group has measured it. The first one's number is shown.
        speeds = []
        for rank, _, axes in by_rank:
            speed = AxisSpeed(*axes[axis])
            if speed.ranks[0] == rank:
                speeds.append(speed)
        latency = statistics.median(speed.latency for speed in speeds)
        bandwidth = statistics.median(speed.bandwidth for speed in speeds)
        slowest = min(speeds, key=lambda speed: speed.bandwidth)
        row = (
            axis,
            len(slowest.ranks),
            len(speeds),
            round(latency * 1e6, 1),
            round(bandwidth / 1e9, 3),
            format_items(slowest.ranks),
            round(slowest.bandwidth / 1e9, 3),
        )
        rows.append(row)
    slowest_rank = max(by_rank, key=lambda measured: measured.local_seconds)
    median = statistics.median(measured.local_seconds for measured in by_rank)
    return (
        f"{format_table(columns, rows)}\n\nevery group has the right ranks and gives the right sum\n\n"
        f"slowest rank: {slowest_rank.rank}, {slowest_rank.local_seconds / median:.2f} times the median "
        "for work of its own"
    )


_SUMMARY = "under torchrun: check every group of a layout with a collective, and measure each axis"
COMMANDS = {"doctor": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
