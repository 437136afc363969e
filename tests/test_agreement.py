"""Ranks that were asked for different things all get an error that names the ranks and the field."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from messages import error_of
from ranks import comes_last, limits_begin_with, live_groups, run_ranks, summed

import namedmesh
from namedmesh import AgreementError, GroupOptions, Layout, launch
from namedmesh.agreement import Agreement, Agreements
from namedmesh.compat.deepspeed import mpu
from namedmesh.store import LimitedStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    import pytest

WRONG = 2
MINUTE, SOON = timedelta(seconds=60), timedelta(seconds=1)
SLOW = GroupOptions(timeout=MINUTE)


def _told(make: Callable[[], object]) -> tuple[str, int]:
    """The error, and how many groups it left behind."""
    before = live_groups()
    return error_of(make), live_groups() - before


def _one_is_wrong(right: Callable[[], object], wrong: Callable[[], object]) -> tuple[str, int]:
    return _told(wrong if dist.get_rank() == WRONG else right)


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
    "options and sharing": (
        lambda: namedmesh.init_mesh(
            dp=2, tp=2, share_groups=False, options={"tp": GroupOptions(timeout=timedelta(seconds=9))}
        ),
        "2 problems:\n  - "
        + _differs("options", "{'tp': GroupOptions(timeout=datetime.timedelta(seconds=9))}", "{}")
        + "\n  - "
        + _differs("share_groups", "False", "True"),
    ),
    "timeout": (
        lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=timedelta(seconds=50)),
        _differs("defaults", "GroupOptions(timeout=datetime.timedelta(seconds=50))", "GroupOptions()"),
    ),
}
ABSENT = (
    "AgreementError: rank 2 of 0 to 3 did not call init_mesh within 1 s; every rank of the mesh must call it, so look at what those "
    "ranks did instead"
)


def test_every_rank_reports_what_differs() -> None:
    expected = {case: (f"AgreementError: {text}", 0) for case, (_, text) in CASES.items()}
    told = run_ranks(4, lambda: {case: _one_is_wrong(_right, wrong) for case, (wrong, _) in CASES.items()})
    assert told == [expected] * 4


def test_a_mistake_on_one_rank_is_told_to_the_others() -> None:
    for wrong in (
        lambda: namedmesh.init_mesh(dp=1, tp=2),
        lambda: namedmesh.init_mesh(dp=-1, tp=-1),
        lambda: namedmesh.init_mesh(dp=2, tp=2, share_groups="yes"),  # type: ignore[arg-type]
    ):
        told = run_ranks(4, _one_is_wrong, _right, wrong)
        assert [made for _, made in told] == [0] * 4
        assert told[WRONG][0].startswith("LayoutError: ")
        mistake = told[WRONG][0].removeprefix("LayoutError: ")
        others = [text for rank, (text, _) in enumerate(told) if rank != WRONG]
        assert others == [f"AgreementError: rank 2 gave up on init_mesh: {mistake}"] * 3


def test_another_torch_version_is_reported() -> None:
    for text, made in run_ranks(4, _one_is_wrong, _right, _newer_torch):
        assert made == 0
        assert text.startswith("AgreementError: torch differs between ranks: ")
        assert "on ranks 0, 1, 3; 9.9.9 on rank 2; " in text


def test_all_ranks_wrong_in_the_same_way_get_the_mistake_itself() -> None:
    for text, made in run_ranks(4, _told, lambda: namedmesh.init_mesh(dp=3)):
        assert made == 0
        assert text.startswith("LayoutError: dp=3 needs 3 ranks, ")


def _absent(call: Callable[[], object]) -> tuple[str, int] | None:
    return None if dist.get_rank() == WRONG else _told(call)


def test_a_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    def call() -> object:
        return namedmesh.init_mesh(dp=2, tp=2, timeout=SOON)

    expected = (ABSENT, 0)
    with limits_begin_with(3):
        assert run_ranks(4, _absent, call) == [expected, expected, None, expected]


def _in_file(path: str) -> list[object]:
    """The ranks meet in a file; one comes too late, one asks for something else, then all ask for the same."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(path, 4), rank=rank, world_size=4)
    told: list[object] = [_absent(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=SOON))]
    summed(None)
    if rank == WRONG:
        told.append(_told(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=SOON)))
    summed(None)
    told.append(_one_is_wrong(_right, lambda: namedmesh.init_mesh(dp=4, tp=1)))
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    told.append(summed(mesh.group("tp"), rank))
    mesh.close()
    dist.destroy_process_group()
    return told


def test_a_file_is_as_good_a_store_as_a_server(tmp_path: Path) -> None:
    absent, differ = (ABSENT, 0), (f"AgreementError: {CASES['sizes'][1]}", 0)
    with limits_begin_with(3):
        outcomes = run_ranks(4, _in_file, str(tmp_path / "store"), init=False)
    assert outcomes[WRONG] == [None, absent, differ, 5.0]
    assert [outcomes[rank] for rank in (0, 1, 3)] == [[absent, differ, total] for total in (1.0, 1.0, 5.0)]


def _later_calls() -> list[str]:
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    mine = dist.get_rank() == WRONG
    told = [
        error_of(lambda: mesh.flatten("dp", "tp", name="all" if mine else None)),
        error_of(lambda: mesh.add_view("expert", ep=4) if mine else mesh.add_view("expert", edp=2, ep=2)),
        error_of(lambda: mesh.add_view("expert", ep=4) if mine else mesh.flatten("dp", "tp")).splitlines()[1],
        error_of(lambda: mesh.flatten("dp", "tq" if mine else "tp")),
        error_of(lambda: mesh.add_view("expert", ep=3 if mine else 4)),
    ]
    mesh.close()
    # Afterwards nothing is out of step.
    again = namedmesh.init_mesh(dp=2, tp=2)
    again.flatten("dp", "tp")
    again.close()
    return told


def test_flatten_and_add_view_agree_too() -> None:
    for rank, told in enumerate(run_ranks(4, _later_calls)):
        mistake = ("AxisError: axis 'tq' ", "LayoutError: ep=3 needs 3 ranks, ")
        if rank != WRONG:
            mistake = (
                "AgreementError: rank 2 gave up on mesh.flatten: axis 'tq' ",
                "AgreementError: rank 2 gave up on mesh.add_view('expert'): ep=3 needs 3 ranks, ",
            )
        assert told[:3] == [
            "AgreementError: " + _differs("name", "all", "dp_tp"),
            "AgreementError: " + _differs("layout", "Layout(ep=4)", "Layout(edp=2, ep=2)"),
            "  - " + _differs("call", "mesh.add_view('expert')", "mesh.flatten"),
        ]
        assert told[3].startswith(mistake[0])
        assert told[4].startswith(mistake[1])


def test_agreeing_ranks_exchange_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    add = LimitedStore.add

    def add_no_request(self: LimitedStore, key: str, amount: int = 1) -> int:
        assert amount == 0 or not key.endswith("/other requests")
        return add(self, key, amount)

    monkeypatch.setattr(LimitedStore, "add", add_no_request)
    assert run_ranks(4, lambda: repr(_right())) == [
        f"<NamedMesh dp=2 x tp=2 (4 ranks), rank {rank} on cpu>" for rank in range(4)
    ]


def _keys_after(agreements: int) -> list[int]:
    """How many keys the store holds after some agreements in which a field differs that may, and after more."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    known, counts = Agreements(lambda _: store), []
    for _ in range(2):
        for _ in range(agreements):
            rank = dist.get_rank()
            with Agreement("call", ranks=range(3), rank=rank, known=known, timeout=MINUTE) as agreement:
                agreement.compare({"_of this rank": str(rank)})
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_agreements_leave_no_keys_behind() -> None:
    for before, after in run_ranks(3, _keys_after, 5):
        assert before == after


def test_layouts_given_as_objects_are_compared_by_value() -> None:
    def call() -> str:
        if dist.get_rank() == WRONG:
            return repr(namedmesh.init_mesh(Layout.from_order("tp-dp", tp=2, dp=2)).layout)
        return repr(namedmesh.init_mesh(dp=-1, tp=2).layout)

    assert run_ranks(4, call) == ["Layout(dp=2, tp=2)"] * 4


def test_agreement_errors_are_runtime_errors() -> None:
    assert issubclass(AgreementError, RuntimeError)


# A rank that is interrupted while it waits, and one that fails after all agreed.


def _send_once_it_waits(process: int, number: int) -> None:
    """Send a signal as soon as some thread waits for the other ranks, the store being open."""
    names: set[str] = set()
    while "_wait" not in names:
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
        threading.Event().wait(0.02)
    os.kill(process, number)


def _interrupted(number: int) -> tuple[str, str]:
    """Ranks 0 and 1 wait for rank 2; a signal ends the wait of rank 1."""
    rank = dist.get_rank()
    if rank == 1:
        threading.Thread(target=_send_once_it_waits, args=(os.getpid(), number)).start()
    if rank == WRONG:
        return "", ""
    try:
        return "", error_of(lambda: namedmesh.init_mesh(dp=3))
    except KeyboardInterrupt:
        return "interrupted", ""


def test_ctrl_c_takes_effect_at_once_and_is_told_to_the_others() -> None:
    told = run_ranks(3, _interrupted, signal.SIGINT)
    assert told[1] == ("interrupted", "")
    assert told[0] == ("", "AgreementError: rank 1 gave up on init_mesh: KeyboardInterrupt")


def _interrupted_while_opening() -> str:
    """Ctrl-C comes while rank 1 opens the store, which does not answer it; the second time it does."""
    opened, calls = launch.open_store, count()

    def open_store(*arguments: Any) -> dist.Store:
        if next(calls) == 0:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
        return opened(*arguments)

    if os.environ["RANK"] == "1":
        setattr(launch, "open_store", open_store)  # noqa: B010  of other types
    try:
        return error_of(lambda: launch.init("cpu"))
    except KeyboardInterrupt:
        return "interrupted"


def test_a_rank_that_is_interrupted_while_it_opens_the_store_tells_the_others() -> None:
    told = run_ranks(2, _interrupted_while_opening, init=False)
    assert told == ["AgreementError: rank 1 gave up on launch.init: KeyboardInterrupt", "interrupted"]


def _terminated() -> str:
    """As above, in a child of rank 1, which SIGTERM ends as it ends any process that does not handle it."""
    rank = int(os.environ["RANK"])
    if rank == WRONG:
        return ""
    if rank == 0:
        return error_of(lambda: launch.init("cpu"))
    child = os.fork()
    if child == 0:
        launch.init("cpu")
        os._exit(0)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    store.wait(["namedmesh/agreements/0-3/rank/1"], timedelta(seconds=60))
    store.wait(["namedmesh/agreements/0-3/0/request"], timedelta(seconds=60))
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return signal.Signals(os.WTERMSIG(status)).name


def test_sigterm_takes_effect_at_once_and_is_told_to_the_others() -> None:
    told = run_ranks(3, _terminated, init=False)
    assert told == ["AgreementError: rank 1 gave up on launch.init: SystemExit: SIGTERM", "SIGTERM", ""]


def _fails_on_one() -> list[object]:
    """A network interface that rank 2 does not have, set where the default group exists already."""
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    before = live_groups()
    if dist.get_rank() == WRONG:
        os.environ["GLOO_SOCKET_IFNAME"] = "doesnotexist0"
    told: list[object] = []
    for call in (
        lambda: mesh.flatten("dp", "tp", options=SLOW),
        lambda: namedmesh.init_mesh(a=2, b=2, timeout=MINUTE),
    ):
        try:
            told.append(error_of(call))
        except RuntimeError as error:
            told.append(f"{type(error).__name__}: {error}")
    told.append(live_groups() - before)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    told.append(summed(mesh.flatten("dp", "tp", options=SLOW).get_group()))
    mesh.close()
    return told


def test_a_group_that_cannot_be_created_on_one_rank_fails_on_all() -> None:
    told = run_ranks(4, _fails_on_one)
    assert all("Unable to find address for: " in str(said) for said in told.pop(WRONG)[:2])
    for first, second, left, total in told:
        assert str(first).startswith("AgreementError: rank 2 gave up on mesh.flatten: RuntimeError: ")
        assert str(second).startswith("AgreementError: rank 2 gave up on init_mesh: RuntimeError: ")
        assert (left, total) == (0, 4.0)


def _made_again() -> list[float]:
    """A group that was destroyed by hand is made again, with one member late: it meets no address of the first."""
    mesh = namedmesh.init_mesh(pp=2, dp=2)
    unit = mpu(mesh)
    sums = [summed(unit.get_model_parallel_group())]
    for late in (0, 2):
        dist.destroy_process_group(mpu(mesh).get_model_parallel_group())
        summed(None)
        with comes_last() if dist.get_rank() == late else nullcontext():
            unit = mpu(mesh)
        sums.append(summed(unit.get_model_parallel_group()))
    mesh.close()
    return sums


def test_a_group_destroyed_by_hand_is_made_again_under_new_addresses() -> None:
    assert run_ranks(4, _made_again) == [[2.0] * 3] * 4


def _destroyed_on_one() -> tuple[str, int, float | None]:
    """A group over an irregular set of ranks, destroyed by hand on one of them; and then on the other one too."""
    rank = dist.get_rank()
    mesh = namedmesh.init_mesh(pp=4)

    def make() -> dist.ProcessGroup | None:
        with mesh.agreed("sets") as maker:
            maker.compare({})
            return maker.make_sets([(0, 3)], "ends").get((0, 3))

    group = make()
    if rank == 0:
        dist.destroy_process_group(group)
    before = live_groups()
    told, left = error_of(make), live_groups() - before
    if rank == 3:
        dist.destroy_process_group(group)
    group = make()
    total = None if group is None else summed(group, rank)
    mesh.close()
    return told, left, total


def test_a_group_that_only_some_ranks_make_fails_on_all() -> None:
    text = (
        "AgreementError: sets makes a group of 2 ranks on rank 0 only; the others have it still, from an earlier mesh: close() that "
        "mesh on every rank"
    )
    told = run_ranks(4, _destroyed_on_one)
    assert told == [(text, 0, total) for total in (3.0, None, None, 3.0)]
