"""The commands that run on real ranks, under torchrun: ``namedmesh doctor`` and ``namedmesh verify``.

The doctor checks every group of a layout by a collective, and measures each axis and host: rank 0 prints what all of them
measured; what is wrong is an error on every rank. ``verify`` compares a model of the user's under its plan with one process.
Torch is imported when a command runs.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh.errors import AgreementError, PlanError, format_count, format_items, format_ranks
from namedmesh.plan.spec import (
    EXIT_MISMATCH,
    add_layout_arguments,
    format_table,
    make_layouts,
    parse_spec,
    read_layout_arguments,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_WARM, _ROUNDS = 3, 9
_SLOWEST = 8  # pairs of hosts that are shown

Problem = tuple[str, str]  # an axis, and a sentence


class Group(NamedTuple):
    """A group to check: its axis, the ranks that should be in it, and the group itself."""

    axis: str
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


def _configure(parser: ArgumentParser) -> None:
    add_layout_arguments(parser)
    text = "seconds to wait for a rank, or for a collective (default: 60)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help=text)
    parser.add_argument("--device", help="cpu, cuda, or one device (default: what torch finds)")
    text = "size of the large all-reduce (default: 4, on a GPU 64)"
    parser.add_argument("--megabytes", type=float, metavar="M", help=text)


def _run(arguments: Namespace) -> int:
    import torch.distributed as dist

    from namedmesh import launch
    from namedmesh._torch import abort_groups, all_gather_object, set_group_timeout
    from namedmesh.init import init_mesh

    spec, sizes = read_layout_arguments(arguments)
    parse_spec(spec)  # what cannot be read is said before the ranks look for each other
    timeout = timedelta(seconds=arguments.timeout)
    device = launch.init(arguments.device, timeout=timeout)
    # A stuck collective has to be found by polling, before NCCL's own timeout ends the process. Groups of the mesh have it too.
    set_group_timeout(3 * timeout, None)
    try:
        world = dist.get_world_size()
        arrangement = make_layouts(spec, world_size=world, **sizes)
        # A rank that waits for a stuck collective comes to the others after its own timeout.
        reports = dist.new_group(backend="gloo", timeout=3 * timeout)
        mesh = init_mesh(arrangement.dense, device=device.type)
        if arrangement.expert is not None:
            mesh.add_view("expert", **dict[str, Any](arrangement.expert.items()))
        axes = dict.fromkeys((*arrangement.dense, *(arrangement.expert or ())))
        groups = [Group(axis, mesh.ranks(axis), mesh.group(axis)) for axis in axes if mesh.size(axis) > 1]
        groups.append(Group("world", tuple(range(world)), dist.group.WORLD))
        found = all_gather_object(reports, check_groups(groups, device, timeout))
        if any(found):
            # To destroy groups would wait for a stuck collective, so the report comes first, and then they are aborted.
            sys.stderr.write(f"namedmesh doctor: {AgreementError(*problems_of(found))}\n")
            sys.stderr.flush()
            abort_groups()
            return 1
        hosts = all_gather_object(reports, socket.gethostname())
        megabytes = arguments.megabytes or (4 if device.type == "cpu" else 64)
        each = all_gather_object(reports, measure(groups, hosts, device, round(megabytes * 2**20)))
        if dist.get_rank() == 0:
            where = f"{dist.get_backend()} on {device.type}, {format_count(len(set(hosts)), 'host')}"
            sys.stdout.write(f"{arrangement.dense}, {where}\n\n{report_text(each)}\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def problems_of(found: Sequence[Problem | None]) -> list[str]:
    """Return what ranks found, each problem once with all of its ranks."""
    problems = []
    for problem in filter(None, dict.fromkeys(found)):
        ranks = [rank for rank, own in enumerate(found) if own == problem]
        problems.append(f"axis {problem[0]}, {format_ranks(ranks)}: {problem[1]}")
    return problems


def check_groups(groups: Sequence[Group], device: torch.device, timeout: timedelta) -> Problem | None:
    """Return the axis and the problem of the first group whose ranks, or whose sum, are wrong; later ones would mean nothing."""
    import torch
    import torch.distributed as dist

    for axis, ranks, group in groups:
        own = torch.tensor([dist.get_rank()], device=device)
        members = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        try:
            _wait(dist.all_gather(members, own, group=group, async_op=True), timeout)
            found = tuple(int(member.item()) for member in members)
            if found != ranks:
                return axis, f"its group has ranks {format_items(found)} instead of {format_items(ranks)}"
            _wait(dist.all_reduce(own, group=group, async_op=True), timeout)
            if own.item() != sum(ranks):
                return axis, f"an all-reduce gave {own.item()} instead of {sum(ranks)}"
        except (RuntimeError, TimeoutError) as error:
            return axis, str(error).strip().partition("\n")[0] or type(error).__name__
    return None


def _wait(work: Any, timeout: timedelta) -> None:
    """Wait for a collective by polling: its own timeout may abort the process."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a collective did not end within {timeout.total_seconds():g} s")
        time.sleep(0.001)
    work.wait()


class Measured(NamedTuple):
    """What a rank measured: seconds of work of its own; by axis its group, latency and bandwidth; bytes a second between hosts."""

    local: float
    axes: dict[str, tuple[tuple[int, ...], float, float]]
    links: dict[str, float]


def measure(groups: Sequence[Group], hosts: Sequence[str], device: torch.device, size: int) -> Measured:
    """Return the seconds of a matrix product, of small and large all-reduces, and of messages to the host that this one is paired with.

    A ring sends 2 (n-1)/n of an all-reduce's bytes over each link; that is what counts, whatever the algorithm.
    """
    import torch
    import torch.distributed as dist

    rank, matrix = dist.get_rank(), torch.ones(2 * [256 if device.type == "cpu" else 4096], device=device)
    small, large = torch.zeros(1, device=device), torch.zeros(max(1, size // 4), device=device)
    axes, links = {}, {}

    def timed(action: Callable[[], object]) -> float:
        times = []
        for _ in range(_WARM + _ROUNDS):
            start = time.perf_counter()
            action()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[_WARM:])

    local = timed(lambda: matrix @ matrix)  # which needs no other rank: a slow rank is no slow link
    for group in groups:
        latency = timed(partial(dist.all_reduce, small, group=group.group))
        seconds = timed(partial(dist.all_reduce, large, group=group.group))
        sent = 2 * (len(group.ranks) - 1) / len(group.ranks) * size
        axes[group.axis] = (group.ranks, latency, sent / seconds)

    def exchange(first: int, second: int) -> None:
        if rank == first:
            dist.send(large, second)
            dist.recv(small, second)
        else:
            dist.recv(large, first)
            dist.send(small, first)

    for first, second in host_pairs(hosts):
        if rank in {first, second}:
            seconds = timed(partial(exchange, first, second))
            if rank == first:
                links[f"{hosts[first]} - {hosts[second]}"] = size / seconds
    return Measured(local, axes, links)


def host_pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return one round of pairs of hosts, by the first rank of each; of an odd number the last meets the first."""
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = zip(firsts[::2], [*firsts[1::2], firsts[0]], strict=False)
    return [(first, second) for first, second in pairs if first != second]


def report_text(each: Sequence[Measured]) -> str:
    """Write what the ranks measured: a row for each axis, the slowest pairs of hosts, the slowest rank."""
    columns, rows = ("axis", "size", "groups", "latency us", "GB/s", "slowest group", "its GB/s"), []
    for axis in each[0].axes:
        speeds = {one.axes[axis][0]: one.axes[axis][1:] for one in each}
        worst = min(speeds, key=lambda ranks: speeds[ranks][1])
        latency, bandwidth = (statistics.median(column) for column in zip(*speeds.values(), strict=True))
        row = (axis, len(worst), len(speeds), round(latency * 1e6, 1), round(bandwidth / 1e9, 3))
        rows.append((*row, format_items(worst), round(speeds[worst][1] / 1e9, 3)))
    parts = [format_table(columns, rows), "every group has the right ranks and gives the right sum"]
    links = sorted((speed, pair) for one in each for pair, speed in one.links.items())
    if links:
        lines = [f"  {pair}: {speed / 1e9:.3g} GB/s" for speed, pair in links[:_SLOWEST]]
        parts.append("\n".join([f"{format_count(len(links), 'pair')} of hosts, the slowest first:", *lines]))
    times = [one.local for one in each]
    slowest, factor = times.index(max(times)), max(times) / statistics.median(times)
    parts.append(f"slowest rank: {slowest}, {factor:.2f} times the median for work of its own")
    return "\n\n".join(parts)


# namedmesh verify


def _configure_verify(parser: ArgumentParser) -> None:
    text = "a function without arguments that returns the model, its plan and a tuple of inputs, or a dict by name"
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=text)
    text = "the difference that is none (default: %(default)s)"
    parser.add_argument("--tolerance", type=float, default=1e-5, help=text)
    parser.epilog = "Run it under torchrun: torchrun --nproc-per-node 2 -m namedmesh verify MODULE:FUNCTION"


def _verify(arguments: Namespace) -> int:
    """Compare on all ranks of the job; the first one prints the report."""
    model, plan, inputs = _call(arguments)
    args, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    import torch.distributed as dist

    import namedmesh
    from namedmesh.tensor_parallel import verify

    with namedmesh.init_mesh(tp=-1) as mesh:
        report = verify(model, mesh["tp"], plan, *args, tolerance=arguments.tolerance, **named)
    if mesh.rank("tp") == 0:
        sys.stdout.write(f"{report}\n")
    dist.destroy_process_group()
    return 0 if report.passed else EXIT_MISMATCH


def _call(arguments: Namespace) -> tuple[Any, Any, Any]:
    """Return the model, the plan and the inputs that the named function returns."""
    module, separator, name = arguments.function.partition(":")
    if not separator:
        arguments.parser.error(f"{arguments.function!r} is not of the form MODULE:FUNCTION")
    sys.path.insert(0, str(Path.cwd()))
    found = getattr(import_module(module), name)()
    if isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], tuple | dict):  # noqa: PLR2004
        return found
    raise PlanError(
        f"{arguments.function} returned a {type(found).__name__}; return three things: the model, its plan and a tuple "
        f"of inputs, or a dict of them by name"
    )


_DOCTOR = "under torchrun: check every group of a layout with a collective, and measure each axis"
_VERIFY = "under torchrun: compare a model under a tensor-parallel plan with one process"
COMMANDS = {"doctor": (_DOCTOR, _configure, _run), "verify": (_VERIFY, _configure_verify, _verify)}
"""The summary of each command, the function that declares its arguments, and the one that runs it."""
