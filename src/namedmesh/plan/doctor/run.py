"""Run the checks on each rank; report on rank 0."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh.dialects import EXPERT
from namedmesh.errors import AgreementError, LayoutError, NamedMeshError, count_of
from namedmesh.hosts import gloo_address, host_identity
from namedmesh.init import init_mesh
from namedmesh.making import agreed
from namedmesh.options import normalized_backend
from namedmesh.plan.core import resolve
from namedmesh.plan.doctor.checks import (
    check_groups,
    first_line,
    groups_to_check,
    hosts_of_ranks,
    measure_group,
    measure_links,
    measure_work,
    wait,
)
from namedmesh.plan.doctor.report import RankReport, doctor_document, problems_of
from namedmesh.plan.spec import UsageError
from namedmesh.plan.tables import show

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from namedmesh.dialects import DialectLayout
    from namedmesh.mesh import NamedMesh
    from namedmesh.plan.doctor.checks import Speed

_LONGEST, _LARGEST = 1e9, 1e9  # seconds as torch can count them, and megabytes as memory can hold
_LEAVE_TIMEOUT = timedelta(seconds=10)


def run_doctor(spec: str, keywords: Mapping[str, Any], arguments: Namespace) -> int:
    """Check a layout on the ranks of this job, and print one report; communicates.

    Args:
        spec: a spec string, or nothing.
        keywords: what :func:`namedmesh.plan.make_plan` takes instead.
        arguments: the other arguments of the command.

    Returns:
        On every rank 0 if all is well, or 1 if the groups could not be made.

    Raises:
        UsageError: all that is wrong with the numbers and the backend.
        LayoutError: the layout does not fit the world.
        LaunchError: the environment does not describe a job, its store cannot be reached, or the device is not
            there.
        AgreementError: ranks that did not come, or the problems that the checks found; the same on every rank.
    """
    _check_settings(arguments)
    timeout = timedelta(seconds=arguments.timeout)
    try:
        here = launch.init(
            arguments.device, backend=arguments.backend, timeout=timeout, call="namedmesh doctor"
        )
    except AgreementError as error:
        raise AgreementError(f"{error}, or wait longer with --timeout") from None
    try:
        arrangement = resolve(spec, world_size=dist.get_world_size(), **keywords)
        megabytes = arguments.megabytes or (4 if here.type == "cpu" else 64)
        _check(arrangement, here, timeout, megabytes, arguments.format)
    except NamedMeshError:
        raise
    except RuntimeError as error:  # torch's, about a rank that ended or cannot be reached
        sys.stderr.write(
            f"namedmesh doctor: rank {dist.get_rank()} could not make its groups: {first_line(error)}\n"
        )
        return 1
    finally:
        with suppress(RuntimeError, TimeoutError):  # the store ends with rank 0
            wait(dist.barrier(async_op=True), _LEAVE_TIMEOUT)
        dist.destroy_process_group()
    return 0


def _check_settings(arguments: Namespace) -> None:
    problems = []
    for name, most in (("timeout", _LONGEST), ("megabytes", _LARGEST)):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < most:
            problems.append(f"{name} is {value:g}; it is a number above 0 and below {most:g}")
    try:
        normalized_backend(arguments.backend)
    except LayoutError as error:
        problems += error.problems
    if problems:
        raise UsageError(*problems)


def _check(
    arrangement: DialectLayout, device: torch.device, timeout: timedelta, megabytes: float, form: str
) -> None:
    """Check the groups, show the report on rank 0, and raise the problems on every rank."""
    rank = dist.get_rank()
    mesh = init_mesh(arrangement.dense, device=device.type)
    headline = f"{mesh.layout}, {dist.get_backend()} on {device.type}"
    try:
        if arrangement.expert is not None:
            sizes: dict[str, Any] = dict(arrangement.expert.items())
            mesh.add_view(EXPERT, **sizes)
        reports, links = _measured(mesh, device, timeout, megabytes)
        if rank == 0:
            headline += f", {count_of(len({report.place for report in reports}), 'host')}"
            show(doctor_document(headline, reports, links), form)
    except AgreementError as error:
        if rank == 0:
            show(doctor_document(headline, problems=error.problems), form)
        raise
    finally:
        mesh.close()


def _measured(
    mesh: NamedMesh, device: torch.device, timeout: timedelta, megabytes: float
) -> tuple[list[RankReport], list[Speed]]:
    """Check and measure; return the reports of all ranks on rank 0, and the links between hosts.

    Raises:
        AgreementError: the problems that any rank found, on every rank.
    """
    rank, ranks, groups = mesh.global_rank, mesh.layout.ranks, groups_to_check(mesh)
    found = check_groups(groups, rank, device, timeout)
    # A rank that waits for a stuck collective comes after its own timeout.
    with agreed(mesh.pool, "the checks of namedmesh doctor", ranks, timeout=2 * timeout) as maker:
        maker.agreement.compare({"_found": json.dumps([rank, *found])}, _problems_in)
        if found[1]:  # a rank alone has nobody to agree with
            raise AgreementError(*problems_of({rank: found}))
        local = measure_work(device)
        axes = {group.axis: measure_group(group, device, megabytes) for group in groups}
        report = RankReport(socket.gethostname(), host_identity(), gloo_address(), local, axes)
        links = measure_links(hosts_of_ranks(report.place, device), rank, device, megabytes)
        texts = {str(rank): json.dumps(report)}
        heard = {**texts}
        maker.agreement.exchange = SimpleNamespace(
            texts=lambda: texts, keys=lambda: [*map(str, ranks)] if rank == 0 else [], take=heard.update
        )
    return [RankReport.from_data(json.loads(text)) for text in heard.values()], links


def _problems_in(requests: Sequence[Mapping[str, str]]) -> list[str]:
    each = (json.loads(request["_found"]) for request in requests)
    return problems_of({rank: (axis, problem) for rank, axis, problem in each})
