"""The doctor's visit, as every rank lives through it: roll call, mesh, checks, one verdict for all."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh.dialects import EXPERT
from namedmesh.errors import LaunchError, NamedMeshError, listing
from namedmesh.init import init_mesh
from namedmesh.plan.core import resolve
from namedmesh.plan.doctor.checks import RankReport, examine, probes
from namedmesh.plan.doctor.report import Diagnosis, diagnose, doctor_document
from namedmesh.plan.doctor.rollcall import RollCall, call_the_roll
from namedmesh.plan.spec import UsageError
from namedmesh.plan.tables import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.dialects import Arrangement

__all__ = ["Settings", "examination"]


@dataclass(frozen=True)
class Settings:
    """How to examine.

    Args:
        timeout: seconds to wait for ranks that do not come, and for collectives that do not end.
        device: as for :func:`namedmesh.init_mesh`.
        backend: likewise.
        megabytes: the size of the large all-reduce; by default 4 on the CPU and 64 on an accelerator.
        format: the format of the report.
    """

    timeout: float = 60.0
    device: str | None = None
    backend: str | None = None
    megabytes: float | None = None
    format: str = "text"

    @property
    def patience(self) -> timedelta:
        """The timeout as torch takes it."""
        return timedelta(seconds=self.timeout)


def examination(spec: str, keywords: Mapping[str, Any], settings: Settings) -> int:
    """Check a layout on the ranks of this job, and print one report; communicates.

    Args:
        spec: a spec string, or nothing.
        keywords: what :func:`namedmesh.plan.make_plan` takes instead.
        settings: how to examine.

    Returns:
        On every rank 0 if all is well, else 1.

    Raises:
        LayoutError: the layout does not fit the world; on the rank that speaks, the others return 1 or 2.
        LaunchError: the environment does not describe a job, or the device is not there.
    """
    roll = call_the_roll(settings.patience)
    try:
        if roll.absent:
            if roll.speaks:
                sys.stderr.write(f"namedmesh doctor: {_absence(roll, settings.timeout)}\n")
            return 1
        arrangement = resolve(spec, world_size=roll.world_size, **keywords)
        chosen = _join(roll, settings)
        try:
            return _examined(roll, arrangement, chosen, settings)
        finally:
            dist.destroy_process_group()
    except NamedMeshError as error:
        # Every rank meets the same mistake, and one of them tells it; a device may be missing on one rank only.
        if roll.speaks or isinstance(error, LaunchError):
            raise
        return 2 if isinstance(error, UsageError) else 1
    except RuntimeError as error:  # torch's, of a peer that is gone or cannot be reached
        told = (str(error).splitlines() or [type(error).__name__])[0]
        sys.stderr.write(f"namedmesh doctor: rank {roll.rank} could not make its groups: {told}\n")
        return 1
    finally:
        roll.part("end")


def _absence(roll: RollCall, timeout: float) -> str:
    ranks = f"rank{'s' * (len(roll.absent) > 1)} {listing(roll.absent)}"
    return (
        f"{ranks} of {roll.world_size} did not show up within {timeout:g} s; look at what the launcher started there"
        ", or wait longer with --timeout"
    )


def _join(roll: RollCall, settings: Settings) -> torch.device:
    """Make the default group on the store of the roll call, and select this rank's device."""
    chosen = launch.local_device(settings.device)
    if chosen.type != "cpu":
        torch.get_device_module(chosen).set_device(chosen)
    dist.init_process_group(
        settings.backend or dist.get_default_backend_for_device(chosen),
        store=dist.PrefixStore("group", roll.store),
        rank=roll.rank,
        world_size=roll.world_size,
        timeout=settings.patience,
    )
    return chosen


def _examined(roll: RollCall, arrangement: Arrangement, device: torch.device, settings: Settings) -> int:
    mesh = init_mesh(arrangement.dense, device=device.type)
    try:
        if arrangement.expert is not None:
            sizes: dict[str, Any] = dict(arrangement.expert.items())
            mesh.add_view(EXPERT, **sizes)
        found = probes(mesh)
        report = examine(
            found,
            roll.rank,
            device,
            timeout=settings.patience,
            megabytes=settings.megabytes or (4 if device.type == "cpu" else 64),
            step=_Progress(2 * len(found) + 1, shown=roll.rank == 0 and sys.stderr.isatty()),
        )
        diagnosis = _exchanged(roll, report, settings.patience)
        if diagnosis is not None:
            hosts = len(set(roll.hosts.values()))
            words = f"{mesh.layout}, {dist.get_backend()} on {device.type}, {hosts} host{'s' * (hosts > 1)}"
            show(doctor_document(diagnosis, words), settings.format)
        return int(_verdict(roll, settings.patience))
    finally:
        mesh.close()


def _exchanged(roll: RollCall, report: RankReport, patience: timedelta) -> Diagnosis | None:
    """Send what this rank saw to rank 0, which makes a diagnosis of it and says whether anything is wrong."""
    board = dist.PrefixStore("reports", roll.store)
    board.set(str(roll.rank), json.dumps(report.as_data()))
    if roll.rank != 0:
        return None
    # A rank that waits for a stuck collective answers when its own patience is over.
    reports = {rank: _report_of(board, rank, 2 * patience) for rank in range(roll.world_size)}
    diagnosis = diagnose(reports)
    board.set("verdict", str(int(bool(diagnosis.problems))))
    return diagnosis


def _report_of(board: dist.Store, rank: int, patience: timedelta) -> RankReport | None:
    try:
        board.wait([str(rank)], patience)
    except dist.DistStoreError:
        return None
    return RankReport.from_data(json.loads(board.get(str(rank))))


def _verdict(roll: RollCall, patience: timedelta) -> str:
    board = dist.PrefixStore("reports", roll.store)
    try:
        board.wait(["verdict"], 3 * patience)
    except dist.DistStoreError:
        return "1"
    return board.get("verdict").decode()


class _Progress:
    """A bar on standard error that moves on with each step."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self._steps, self._done, self._shown = steps, 0, shown

    def __call__(self, what: str) -> None:
        self._done += 1
        if not self._shown:
            return
        filled = 24 * self._done // self._steps
        last = self._done == self._steps
        sys.stderr.write(f"\r\x1b[K[{'#' * filled:<24}] {what}" + ("\r\x1b[K" if last else ""))
        sys.stderr.flush()
