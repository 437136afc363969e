"""Coordinated calls: ranks that differ, are missing or fail are reported by number on every rank."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from messages import error_of
from ranks import live_groups, run_ranks, summed

import namedmesh
from namedmesh import AgreementError, GroupOptions, Layout
from namedmesh.launch.agreement import agree_on
from namedmesh.launch.coordinator import StoreCoordinator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRONG = 2
MINUTE, SOON = timedelta(seconds=60), timedelta(seconds=5)


def _report(make: Callable[[], object]) -> tuple[str, int]:
    """Return the error of a call, and the number of process groups that it left behind."""
    before = live_groups()
    return error_of(make), live_groups() - before


def _call_wrong_on_one_rank(right: Callable[[], object], wrong: Callable[[], object]) -> tuple[str, int]:
    return _report(wrong if dist.get_rank() == WRONG else right)


def _right() -> object:
    return namedmesh.init_mesh(dp=2, tp=2)


def _newer_torch() -> object:
    setattr(torch, "__version__", "9.9.9")  # noqa: B010  mypy takes it for a constant
    return _right()


def _differs(field: str, wrong: str, right: str = "Layout(dp=2, tp=2)") -> str:
    return f"{field} differs between ranks: {right} on ranks 0, 1, 3; {wrong} on rank 2; give every rank the same"


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "sizes": (lambda: namedmesh.init_mesh(dp=4, tp=1), _differs("layout", "Layout(dp=4, tp=1)")),
    "order": (lambda: namedmesh.init_mesh(tp=2, dp=2), _differs("layout", "Layout(tp=2, dp=2)")),
    "options and timeout": (
        lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=MINUTE, options={"tp": GroupOptions(share=False)}),
        "2 problems:\n  - "
        + _differs("options", "{'tp': GroupOptions(share=False)}", "{}")
        + "\n  - "
        + _differs("defaults", "GroupOptions(timeout=datetime.timedelta(seconds=60))", "GroupOptions()"),
    ),
}


def test_every_rank_reports_what_differs() -> None:
    expected = {case: (f"AgreementError: {text}", 0) for case, (_, text) in CASES.items()}
    reports = run_ranks(
        4, lambda: {case: _call_wrong_on_one_rank(_right, wrong) for case, (wrong, _) in CASES.items()}
    )
    assert reports == [expected] * 4


def test_an_error_on_one_rank_is_reported_on_the_others() -> None:
    wrong: tuple[Callable[[], object], ...] = (
        lambda: namedmesh.init_mesh(dp=1, tp=2),
        lambda: namedmesh.init_mesh(dp=-1, tp=-1),
        lambda: namedmesh.init_mesh(dp=2, tp=2, options={"tq": GroupOptions()}),
    )
    reports = run_ranks(4, lambda: [_call_wrong_on_one_rank(_right, call) for call in wrong])
    for case in range(len(wrong)):
        texts = [by_case[case][0] for by_case in reports]
        mistake = texts.pop(WRONG)
        assert mistake.startswith(("LayoutError: ", "AxisError: "))
        assert texts == [f"AgreementError: rank 2 failed in init_mesh: {mistake.partition(': ')[2]}"] * 3
        assert [by_case[case][1] for by_case in reports] == [0] * 4


def test_a_different_torch_version_is_reported() -> None:
    for text, made in run_ranks(4, _call_wrong_on_one_rank, _right, _newer_torch):
        assert made == 0
        assert text.startswith("AgreementError: torch differs between ranks: ")
        assert "on ranks 0, 1, 3; 9.9.9 on rank 2; " in text


def test_an_error_that_every_rank_makes_is_raised_as_it_is() -> None:
    for text, made in run_ranks(4, _report, lambda: namedmesh.init_mesh(dp=3)):
        assert made == 0
        assert text.startswith("LayoutError: dp=3 needs 3 ranks, ")


def _call_without(who: int) -> str:
    dist.barrier()  # All ranks start at the same time, however busy the machine is.
    if dist.get_rank() == who:
        return ""
    return error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=SOON))


def _call_again_without(who: int) -> str:
    """The same at a later call, when the ranks have the run prefix of the store already."""
    namedmesh.init_mesh(a=4).close()
    return _call_without(who)


def _did_not(rank: int, did: str) -> str:
    return (
        f"AgreementError: rank {rank} of 4 did not {did} within 5 s; make sure that every rank makes the "
        "same calls in the same order"
    )


@pytest.mark.parametrize(
    ("call", "who"),
    [
        (_call_without, 0),
        (_call_again_without, WRONG),
        pytest.param(_call_without, WRONG, marks=pytest.mark.slow),
        pytest.param(_call_again_without, 0, marks=pytest.mark.slow),
    ],
)
def test_a_missing_rank_is_reported_within_the_timeout(call: Callable[[int], str], who: int) -> None:
    reports = run_ranks(4, call, who)
    assert reports.pop(who) == ""
    assert reports == [_did_not(who, "call init_mesh")] * 3


def _call_late(who: int) -> str:
    """One rank calls after the others have failed."""
    soon, rank = timedelta(seconds=1), dist.get_rank()
    error = "" if rank == who else error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=soon))
    dist.barrier()
    return error or error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=soon))


def test_a_late_rank_gets_the_error_that_the_others_got() -> None:
    expected = _did_not(3, "call init_mesh").replace("5 s", "1 s")
    assert run_ranks(4, _call_late, 3) == [expected] * 4


def _use_file_store(path: str) -> list[object]:
    """Over a FileStore: one rank makes a different request, then all make the same one."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(path, 4), rank=rank, world_size=4)
    reports: list[object] = [_call_wrong_on_one_rank(_right, lambda: namedmesh.init_mesh(dp=4, tp=1))]
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    reports.append(summed(mesh.group("tp"), rank))
    mesh.close()
    dist.destroy_process_group()
    return reports


def test_coordinated_calls_work_over_a_file_store(tmp_path: Path) -> None:
    differ = (f"AgreementError: {CASES['sizes'][1]}", 0)
    outcomes = run_ranks(4, _use_file_store, str(tmp_path / "store"), init=False)
    assert outcomes == [[differ, total] for total in (1.0, 1.0, 5.0, 5.0)]


def _call_mesh_methods() -> list[str]:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    is_wrong = dist.get_rank() == WRONG
    reports = [
        error_of(lambda: mesh.flatten("dp", "tp", name="all" if is_wrong else None)),
        error_of(lambda: mesh.add_view("expert", ep=4) if is_wrong else mesh.add_view("expert", edp=2, ep=2)),
        error_of(
            lambda: mesh.add_view("expert", ep=4) if is_wrong else mesh.flatten("dp", "tp")
        ).splitlines()[1],
        error_of(lambda: mesh.flatten("dp", "tq" if is_wrong else "tp")),
        error_of(lambda: mesh.add_view("expert", ep=3 if is_wrong else 4)),
    ]
    mesh.close()
    # The ranks still make the same calls in the same order.
    again = namedmesh.init_mesh(dp=2, tp=2)
    again.flatten("dp", "tp")
    again.close()
    return reports


def test_flatten_and_add_view_are_compared_too() -> None:
    for rank, reports in enumerate(run_ranks(4, _call_mesh_methods)):
        mistake = ("AxisError: axis 'tq' ", "LayoutError: ep=3 needs 3 ranks, ")
        if rank != WRONG:
            mistake = (
                "AgreementError: rank 2 failed in mesh.flatten: axis 'tq' ",
                "AgreementError: rank 2 failed in mesh.add_view('expert'): ep=3 needs 3 ranks, ",
            )
        assert reports[:3] == [
            "AgreementError: " + _differs("name", "all", "dp_tp"),
            "AgreementError: " + _differs("layout", "Layout(ep=4)", "Layout(edp=2, ep=2)"),
            "  - " + _differs("call", "mesh.add_view('expert')", "mesh.flatten"),
        ]
        assert reports[3].startswith(mistake[0])
        assert reports[4].startswith(mistake[1])


def test_layouts_given_as_objects_are_compared_by_value() -> None:
    def call() -> str:
        if dist.get_rank() == WRONG:
            return repr(namedmesh.init_mesh(Layout.from_order("tp-dp", tp=2, dp=2)).layout)
        return repr(namedmesh.init_mesh(dp=-1, tp=2).layout)

    assert run_ranks(4, call) == ["Layout(dp=2, tp=2)"] * 4


def test_agreement_errors_are_runtime_errors() -> None:
    assert issubclass(AgreementError, RuntimeError)


def _destroy_groups_on_one_rank() -> str:
    """One rank destroys groups that the others keep. It would then create groups that they do not."""
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    groups = [mesh.group("tp"), mesh.group("dp")]
    mesh.close()
    if dist.get_rank() == WRONG:
        for group in groups:
            dist.destroy_process_group(group)
    return error_of(lambda: namedmesh.init_mesh(dp=2, tp=2))


def test_groups_that_exist_on_some_ranks_only_are_reported() -> None:
    text = _differs("groups that exist", "none", "dp, tp")
    assert run_ranks(4, _destroy_groups_on_one_rank) == [f"AgreementError: {text}"] * 4


# A rank that fails during the operation, or does not reach its end.


def _raise_during_operation() -> str:
    def work() -> None:
        with agree_on("work", MINUTE) as compare:
            compare({})
            if dist.get_rank() == WRONG:
                raise RuntimeError("no memory left")

    try:
        return error_of(work)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def test_an_exception_during_the_operation_is_reported_at_once() -> None:
    # The ranks do not wait for the timeout of a minute. Otherwise run_ranks would time out first.
    text = "AgreementError: rank 2 failed in work: RuntimeError: no memory left"
    assert run_ranks(4, _raise_during_operation, timeout=45.0) == [text] * 4


def _stop_during_operation() -> str:
    """Rank 2 stops between the comparison and the end, as a killed rank does."""

    def work() -> None:
        with agree_on("work", SOON) as compare:
            compare({})

    if dist.get_rank() != WRONG:
        return error_of(work)
    unfinished = agree_on("work", SOON)
    unfinished.__enter__()({})
    return ""


def test_a_rank_that_stops_during_the_operation_is_reported_within_the_timeout() -> None:
    reports = run_ranks(4, _stop_during_operation)
    assert reports.pop(WRONG) == ""
    assert reports == [_did_not(WRONG, "reach the end of work")] * 3


def _use_missing_interface() -> list[str]:
    """A network interface that does not exist on rank 2 is set after the default group was made."""
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    if dist.get_rank() == WRONG:
        os.environ["GLOO_SOCKET_IFNAME"] = "doesnotexist0"
    reports = [error_of(lambda: namedmesh.init_mesh(a=2, b=2, timeout=SOON))]
    mesh.close()
    return reports


def test_a_group_that_cannot_be_created_on_one_rank_fails_on_every_rank() -> None:
    for (text,) in run_ranks(4, _use_missing_interface):
        assert text.startswith("AgreementError: ")
        assert "rank 2 failed in init_mesh: RuntimeError: " in text
        assert "Unable to find address for: " in text


def _count_keys() -> list[int]:
    """Return by how much the number of keys in the store grows over ten calls of two kinds."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    counts = []
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    for _ in range(6):
        mesh.flatten("dp", "tp")
        mesh.close()
        mesh = namedmesh.init_mesh(dp=2, tp=2)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    mesh.close()
    return [counts[-1] - counts[0]]


def test_the_keys_of_a_call_are_deleted_by_the_next_call() -> None:
    assert run_ranks(4, _count_keys) == [[0]] * 4


def _count_operations() -> int:
    """Return the number of operations on the store that this rank needs for one coordinated call."""
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    operations = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("set", "get", "add", "wait", "check", "compare_set", "multi_get"):
            operation = getattr(dist.PrefixStore, name)

            def count(self: Any, *arguments: Any, name: str = name, operation: Any = operation) -> Any:
                operations[name] += 1
                return operation(self, *arguments)

            patch.setattr(dist.PrefixStore, name, count)
        with agree_on("work") as compare:
            compare({"field": 1})
    mesh.close()
    return operations.total()


def test_a_call_needs_few_operations_of_the_store_on_every_rank() -> None:
    # A digest, an arrival and the result before the operation; an arrival and the result after it.
    assert run_ranks(4, _count_operations) == [5] * 4


def _restart() -> list[str]:
    """torchrun restarts the ranks of a job on the same store, which has the keys of the previous attempts."""
    rank = dist.get_rank()
    store = dist.PrefixStore(
        "job", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    )
    reports = []
    for wrong in (False, True, False):  # Each attempt makes a different request.
        dist.barrier()
        if wrong and rank == WRONG:  # In the previous attempt it was killed before it had its prefix.
            killed: Any = dist.PrefixStore("namedmesh", store)
            killed.append("nonces", uuid4().hex)
        dist.barrier()
        coordinator = StoreCoordinator(store, rank, 4)

        def call(coordinator: StoreCoordinator = coordinator, wrong: bool = wrong) -> None:
            with agree_on("start", MINUTE, coordinator) as compare:
                compare({"seed": 2 if wrong and rank == WRONG else 1})

        reports.append(error_of(call))
    return reports


def test_a_restarted_job_does_not_read_the_keys_of_previous_attempts() -> None:
    text = "AgreementError: " + _differs("seed", "2", "1")
    assert run_ranks(4, _restart) == [["", text, ""]] * 4


def _fail_on_one_rank(failing: int) -> str:
    """Return the text that the interpreter prints for an uncaught error of init_mesh."""
    rank = dist.get_rank()
    printed = io.StringIO()
    try:
        namedmesh.init_mesh(dp=2, tp=3 if rank == failing else 1, device="cpu")
    except Exception as error:  # noqa: BLE001  whichever the rank has
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    return printed.getvalue()


def test_ranks_that_only_heard_of_an_error_print_one_line() -> None:
    texts = run_ranks(2, _fail_on_one_rank, 0)
    assert "Traceback" in texts[0]
    assert "LayoutError: dp=2 x tp=3 needs 6 ranks, but the world has 2" in texts[0]
    assert texts[1].startswith(
        "AgreementError on rank 1: rank 0 failed in init_mesh: dp=2 x tp=3 needs 6 ranks"
    )
    assert texts[1].count("\n") == 1
