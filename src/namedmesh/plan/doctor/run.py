"""Run the checks on each rank; report on rank 0."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh.dialects import EXPERT
from namedmesh.errors import AgreementError, LayoutError, NamedMeshError, count_of
from namedmesh.init import init_mesh
from namedmesh.launch import check_environment, local_device
from namedmesh.launchers import torchrun_variables
from namedmesh.options import normalized_backend
from namedmesh.plan.core import resolve
from namedmesh.plan.doctor.checks import RankReport, check_groups, first_line, groups_to_check
from namedmesh.plan.doctor.report import doctor_document, summarize
from namedmesh.plan.spec import UsageError
from namedmesh.plan.tables import show
from namedmesh.rendezvous import hosts_store, open_store, wait_for_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.dialects import Arrangement

_LONGEST, _LARGEST = 1e9, 1e9  # seconds as torch can count them, and megabytes as memory can hold
_LEAVE_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Settings:
    """How to check.

    Args:
        seconds: how long to wait for ranks that do not come, and for collectives that do not end.
        device: as for :func:`namedmesh.init_mesh`.
        backend: likewise.
        megabytes: the size of the large all-reduce; by default 4 on the CPU and 64 on an accelerator.
        format: the format of the report.
    """

    seconds: float = 60.0
    device: str | None = None
    backend: str | None = None
    megabytes: float | None = None
    format: str = "text"

    def check(self) -> None:
        """Check the numbers and the backend.

        Raises:
            UsageError: all that is wrong with them.
        """
        numbers = (("timeout", self.seconds, _LONGEST), ("megabytes", self.megabytes, _LARGEST))
        problems = [
            f"{name} is {value:g}; it is a number above 0 and below {most:g}"
            for name, value, most in numbers
            if value is not None and not 0 < value < most
        ]
        try:
            normalized_backend(self.backend)
        except LayoutError as error:
            problems += error.problems
        if problems:
            raise UsageError(*problems)

    @property
    def timeout(self) -> timedelta:
        """The timeout as torch takes it."""
        return timedelta(seconds=self.seconds)


@dataclass(frozen=True)
class _Job:
    """This rank, the number of ranks, and a store that they share."""

    rank: int
    world_size: int
    store: dist.Store


def run_doctor(spec: str, keywords: Mapping[str, Any], settings: Settings) -> int:
    """Check a layout on the ranks of this job, and print one report; communicates.

    Args:
        spec: a spec string, or nothing.
        keywords: what :func:`namedmesh.plan.make_plan` takes instead.
        settings: how to check.

    Returns:
        On every rank 0 if all is well, or 1 if the groups could not be made.

    Raises:
        UsageError: settings that cannot be.
        LayoutError: the layout does not fit the world.
        LaunchError: the environment does not describe a job, its store cannot be reached, or the device is not
            there.
        AgreementError: ranks that did not come, or the problems that the checks found; the same on every rank.
    """
    settings.check()
    environment = os.environ
    environment.update(torchrun_variables(environment))
    if not any(name in environment for name in ("RANK", "WORLD_SIZE")):
        return _run(_Job(0, 1, dist.HashStore()), spec, keywords, settings)
    check_environment(environment)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    is_host = hosts_store(environment, rank)
    server = open_store(environment, rank, settings.timeout)
    try:
        store = wait_for_ranks(
            server,
            "namedmesh doctor",
            rank=rank,
            world_size=world_size,
            timeout=settings.timeout,
            is_host=is_host,
            restart=restart,
        )
    except AgreementError as error:
        raise AgreementError(f"{error}, or wait longer with --timeout") from None
    try:
        return _run(_Job(rank, world_size, store), spec, keywords, settings)
    finally:
        # The host of the store stays until the other ranks have read all they need.
        leave = dist.PrefixStore("leave", store)
        if leave.add("count", 1) == world_size:
            leave.set("all", "")
        if is_host:
            _read(leave, "all", _LEAVE_TIMEOUT)


def _run(job: _Job, spec: str, keywords: Mapping[str, Any], settings: Settings) -> int:
    try:
        arrangement = resolve(spec, world_size=job.world_size, **keywords)
        device = _init_process_group(job, settings)
        try:
            _check(job, arrangement, device, settings)
        finally:
            dist.destroy_process_group()
    except NamedMeshError:
        raise
    except RuntimeError as error:  # torch's, about a rank that ended or cannot be reached
        sys.stderr.write(
            f"namedmesh doctor: rank {job.rank} could not make its groups: {first_line(error)}\n"
        )
        return 1
    return 0


def _init_process_group(job: _Job, settings: Settings) -> torch.device:
    """Make the default group on the store of the job, and select this rank's device."""
    device = local_device(settings.device)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        settings.backend or dist.get_default_backend_for_device(device),
        store=dist.PrefixStore("group", job.store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=settings.timeout,
    )
    return device


def _check(job: _Job, arrangement: Arrangement, device: torch.device, settings: Settings) -> None:
    """Check the groups, show the report on rank 0, and raise the problems on every rank."""
    mesh = init_mesh(arrangement.dense, device=device.type)
    try:
        if arrangement.expert is not None:
            sizes: dict[str, Any] = dict(arrangement.expert.items())
            mesh.add_view(EXPERT, **sizes)
        groups = groups_to_check(mesh)
        report = check_groups(
            groups,
            job.rank,
            device,
            timeout=settings.timeout,
            megabytes=settings.megabytes or (4 if device.type == "cpu" else 64),
            step=_Progress(2 * len(groups) + 1, shown=job.rank == 0 and sys.stderr.isatty()),
        )
        store = dist.PrefixStore("reports", job.store)
        store.set(str(job.rank), json.dumps(asdict(report)))
        if job.rank == 0:
            # A rank that waits for a stuck collective reports after its own timeout.
            reports = {rank: _report_of(store, rank, 2 * settings.timeout) for rank in range(job.world_size)}
            summary = summarize(reports)
            store.set("problems", json.dumps(summary.problems))
            hosts = len({report.host for report in reports.values() if report is not None})
            headline = f"{mesh.layout}, {dist.get_backend()} on {device.type}, {count_of(hosts, 'host')}"
            show(doctor_document(summary, headline), settings.format)
        problems = json.loads(_read(store, "problems", 3 * settings.timeout) or '["rank 0 made no report"]')
        if problems:
            raise AgreementError(*problems)
    finally:
        mesh.close()


def _report_of(store: dist.Store, rank: int, timeout: timedelta) -> RankReport | None:
    text = _read(store, str(rank), timeout)
    return None if text is None else RankReport.from_data(json.loads(text))


def _read(store: dist.Store, key: str, timeout: timedelta) -> str | None:
    """Read a key of a store; None if it is not set in time."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:
        return None
    return store.get(key).decode()


class _Progress:
    """A bar on standard error that advances with each step."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self._steps, self._done, self._shown = steps, 0, shown

    def __call__(self, step: str) -> None:
        self._done += 1
        if not self._shown:
            return
        filled = 24 * self._done // self._steps
        last = self._done == self._steps
        sys.stderr.write(f"\r\x1b[K[{'#' * filled:<24}] {step}" + ("\r\x1b[K" if last else ""))
        sys.stderr.flush()
