"""Run the checks on each rank; report on rank 0."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from namedmesh import launch
from namedmesh._torch import default_store
from namedmesh.dialects import EXPERT
from namedmesh.errors import AgreementError, LayoutError, NamedMeshError, count_of
from namedmesh.init import init_mesh
from namedmesh.launch import hosts_store
from namedmesh.options import normalized_backend
from namedmesh.plan.core import resolve
from namedmesh.plan.doctor.checks import (
    LinkReport,
    RankReport,
    check_groups,
    first_line,
    groups_to_check,
    hosts_to_measure,
    measure_links,
)
from namedmesh.plan.doctor.report import doctor_document, problems_of
from namedmesh.plan.spec import UsageError
from namedmesh.plan.tables import show
from namedmesh.store import LimitedStore, StoreLostError, ask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from namedmesh.dialects import DialectLayout

T = TypeVar("T")

_LONGEST, _LARGEST = 1e9, 1e9  # seconds as torch can count them, and megabytes as memory can hold
_LEAVE_TIMEOUT = timedelta(seconds=10)


def run_doctor(
    spec: str,
    keywords: Mapping[str, Any],
    *,
    seconds: float,
    device: str | None,
    backend: str | None,
    megabytes: float | None,
    form: str,
) -> int:
    """Check a layout on the ranks of this job, and print one report; communicates.

    Args:
        spec: a spec string, or nothing.
        keywords: what :func:`namedmesh.plan.make_plan` takes instead.
        seconds: how long to wait for ranks that do not come, and for collectives that do not end.
        device: as for :func:`namedmesh.init_mesh`.
        backend: likewise.
        megabytes: the size of the large all-reduce; by default 4 on the CPU and 64 on an accelerator.
        form: the format of the report.

    Returns:
        On every rank 0 if all is well, or 1 if the groups could not be made.

    Raises:
        UsageError: all that is wrong with the numbers and the backend.
        LayoutError: the layout does not fit the world.
        LaunchError: the environment does not describe a job, its store cannot be reached, or the device is not
            there.
        AgreementError: ranks that did not come, or the problems that the checks found; the same on every rank.
    """
    _check_settings(seconds, megabytes, backend)
    timeout = timedelta(seconds=seconds)
    try:
        here = launch.init(device, backend=backend, timeout=timeout, call="namedmesh doctor")
    except AgreementError as error:
        raise AgreementError(f"{error}, or wait longer with --timeout") from None
    board, rank = _Board(), dist.get_rank()
    try:
        arrangement = resolve(spec, world_size=dist.get_world_size(), **keywords)
        _check(board, arrangement, here, timeout, megabytes or (4 if here.type == "cpu" else 64), form)
    except NamedMeshError:
        raise
    except RuntimeError as error:  # torch's, about a rank that ended or cannot be reached
        sys.stderr.write(f"namedmesh doctor: rank {rank} could not make its groups: {first_line(error)}\n")
        return 1
    finally:
        board.leave()
        dist.destroy_process_group()
    return 0


def _check_settings(seconds: float, megabytes: float | None, backend: str | None) -> None:
    numbers = (("timeout", seconds, _LONGEST), ("megabytes", megabytes, _LARGEST))
    problems = [
        f"{name} is {value:g}; it is a number above 0 and below {most:g}"
        for name, value, most in numbers
        if value is not None and not 0 < value < most
    ]
    try:
        normalized_backend(backend)
    except LayoutError as error:
        problems += error.problems
    if problems:
        raise UsageError(*problems)


class _Board:
    """What the ranks tell each other beside the groups that they check: texts in the store of the job."""

    def __init__(self) -> None:
        self._store = dist.PrefixStore("doctor", default_store())

    def put(self, key: str, text: str) -> None:
        """Set a key."""
        self._ask(lambda store: store.set(key, text))

    def read(self, key: str, timeout: timedelta) -> str | None:
        """Return the text of a key; None if it is not set in time."""
        return self._ask(lambda store: store.get(key) if store.appears(key, timeout) else None)

    def leave(self) -> None:
        """Count this rank as one that has read all it needs; the host of the store stays until all have."""

        def questions(store: LimitedStore) -> None:
            if store.add("left") == dist.get_world_size():
                store.set("all left", "")
            if hosts_store(os.environ, dist.get_rank()):
                store.appears("all left", _LEAVE_TIMEOUT)

        with suppress(AgreementError):
            self._ask(questions)

    def _ask(self, questions: Callable[[LimitedStore], T]) -> T:
        try:
            return ask(self._store, questions)
        except StoreLostError as error:
            raise AgreementError(f"the store of the job is lost during namedmesh doctor: {error}") from None


def _check(  # noqa: PLR0917  what run_doctor was given
    board: _Board,
    arrangement: DialectLayout,
    device: torch.device,
    timeout: timedelta,
    megabytes: float,
    form: str,
) -> None:
    """Check the groups, show the report on rank 0, and raise the problems on every rank."""
    rank = dist.get_rank()
    mesh = init_mesh(arrangement.dense, device=device.type)
    try:
        if arrangement.expert is not None:
            sizes: dict[str, Any] = dict(arrangement.expert.items())
            mesh.add_view(EXPERT, **sizes)
        report = check_groups(groups_to_check(mesh), rank, device, timeout=timeout, megabytes=megabytes)
        board.put(f"report/{rank}", json.dumps(asdict(report)))
        reports: dict[int, RankReport | None] = {}
        if rank == 0:
            # A rank that waits for a stuck collective reports after its own timeout.
            for each in mesh.layout.ranks:
                text = board.read(f"report/{each}", 2 * timeout)
                reports[each] = None if text is None else RankReport.from_data(json.loads(text))
            board.put("hosts", json.dumps(hosts_to_measure(reports)))
        hosts = dict(enumerate(json.loads(board.read("hosts", 3 * timeout) or "[]")))
        links = measure_links(hosts, rank, device, megabytes) if hosts else []
        board.put(f"links/{rank}", json.dumps([asdict(link) for link in links]))
        if rank == 0:
            texts = [board.read(f"links/{each}", 2 * timeout) or "[]" for each in hosts]
            found = [LinkReport(**link) for text in texts for link in json.loads(text)]
            board.put("problems", json.dumps(problems_of(reports)))
            count = len({report.host for report in reports.values() if report is not None})
            headline = f"{mesh.layout}, {dist.get_backend()} on {device.type}, {count_of(count, 'host')}"
            show(doctor_document(reports, found, headline), form)
        problems = json.loads(board.read("problems", 3 * timeout) or '["rank 0 made no report"]')
        if problems:
            raise AgreementError(*problems)
    finally:
        mesh.close()
