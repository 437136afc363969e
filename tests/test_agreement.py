"""Ranks that were asked for different things all get an error that names the ranks and the field."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from messages import error_of
from ranks import live_groups, run_ranks, summed

import namedmesh
from namedmesh import AgreementError, GroupOptions, Layout
from namedmesh.agreement import Meetings, agreed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRONG = 2
MINUTE, SOON = timedelta(seconds=60), timedelta(seconds=5)


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
    told = run_ranks(4, lambda: {case: _one_is_wrong(_right, wrong) for case, (wrong, _) in CASES.items()})
    assert told == [expected] * 4


def test_a_mistake_on_one_rank_is_told_to_the_others() -> None:
    wrong: tuple[Callable[[], object], ...] = (
        lambda: namedmesh.init_mesh(dp=1, tp=2),
        lambda: namedmesh.init_mesh(dp=-1, tp=-1),
        lambda: namedmesh.init_mesh(dp=2, tp=2, options={"tq": GroupOptions()}),
    )
    told = run_ranks(4, lambda: [_one_is_wrong(_right, call) for call in wrong])
    for case in range(len(wrong)):
        texts = [by_case[case][0] for by_case in told]
        mistake = texts.pop(WRONG)
        assert mistake.startswith(("LayoutError: ", "AxisError: "))
        assert texts == [f"AgreementError: rank 2 gave up on init_mesh: {mistake.partition(': ')[2]}"] * 3
        assert [by_case[case][1] for by_case in told] == [0] * 4


def test_another_torch_version_is_reported() -> None:
    for text, made in run_ranks(4, _one_is_wrong, _right, _newer_torch):
        assert made == 0
        assert text.startswith("AgreementError: torch differs between ranks: ")
        assert "on ranks 0, 1, 3; 9.9.9 on rank 2; " in text


def test_all_ranks_wrong_in_the_same_way_get_the_mistake_itself() -> None:
    for text, made in run_ranks(4, _told, lambda: namedmesh.init_mesh(dp=3)):
        assert made == 0
        assert text.startswith("LayoutError: dp=3 needs 3 ranks, ")


def _absent(who: int) -> str:
    dist.barrier()  # they begin together, however busy the machine is
    if dist.get_rank() == who:
        return ""
    return error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=SOON))


def _absent_later(who: int) -> str:
    """The same at a later call: the ranks have a part of the store already."""
    namedmesh.init_mesh(a=4).close()
    return _absent(who)


def _did_not(rank: int, did: str) -> str:
    return (
        f"AgreementError: rank {rank} of 4 did not {did} within 5 s; see what they did instead, and make the same calls "
        "on every rank"
    )


def test_a_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    for call in (_absent, _absent_later):
        for who in (0, WRONG):
            told = run_ranks(4, call, who)
            assert told.pop(who) == ""
            assert told == [_did_not(who, "call init_mesh")] * 3


def _late(who: int) -> str:
    """One rank calls when the others have given up."""
    soon, rank = timedelta(seconds=1), dist.get_rank()
    told = "" if rank == who else error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=soon))
    dist.barrier()
    return told or error_of(lambda: namedmesh.init_mesh(dp=2, tp=2, timeout=soon))


def test_a_rank_that_comes_late_is_named_to_itself() -> None:
    expected = _did_not(3, "call init_mesh").replace("5 s", "1 s")
    assert run_ranks(4, _late, 3) == [expected] * 4


def _in_file(path: str) -> list[object]:
    """The ranks meet in a file; one asks for something else, then all ask for the same."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(path, 4), rank=rank, world_size=4)
    told: list[object] = [_one_is_wrong(_right, lambda: namedmesh.init_mesh(dp=4, tp=1))]
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    told.append(summed(mesh.group("tp"), rank))
    mesh.close()
    dist.destroy_process_group()
    return told


def test_a_file_is_as_good_a_store_as_a_server(tmp_path: Path) -> None:
    differ = (f"AgreementError: {CASES['sizes'][1]}", 0)
    outcomes = run_ranks(4, _in_file, str(tmp_path / "store"), init=False)
    assert outcomes == [[differ, total] for total in (1.0, 1.0, 5.0, 5.0)]


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


def test_layouts_given_as_objects_are_compared_by_value() -> None:
    def call() -> str:
        if dist.get_rank() == WRONG:
            return repr(namedmesh.init_mesh(Layout.from_order("tp-dp", tp=2, dp=2)).layout)
        return repr(namedmesh.init_mesh(dp=-1, tp=2).layout)

    assert run_ranks(4, call) == ["Layout(dp=2, tp=2)"] * 4


def test_agreement_errors_are_runtime_errors() -> None:
    assert issubclass(AgreementError, RuntimeError)


def _meshes_closed_on_one_rank() -> str:
    """One rank destroys groups that the others keep: it would make groups that they do not make."""
    namedmesh.init_mesh(dp=2, tp=2).close(destroy_groups=dist.get_rank() == WRONG)
    return error_of(lambda: namedmesh.init_mesh(dp=2, tp=2))


def test_groups_that_only_some_ranks_have_are_told() -> None:
    text = _differs("groups that exist", "none", "dp, tp")
    assert run_ranks(4, _meshes_closed_on_one_rank) == [f"AgreementError: {text}"] * 4


# A rank that fails while the groups are made, or does not come to the end.


def _fails_inside() -> str:
    def work() -> None:
        with agreed("work", MINUTE) as compare:
            compare({})
            if dist.get_rank() == WRONG:
                raise RuntimeError("no memory left")

    try:
        return error_of(work)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_raises_inside_is_named_to_the_others_at_once() -> None:
    # Nobody waits for the minute: the test would take longer than its ranks may.
    text = "AgreementError: rank 2 gave up on work: RuntimeError: no memory left"
    assert run_ranks(4, _fails_inside, timeout=45.0) == [text] * 4


def _ends_inside() -> str:
    """Rank 2 stops between the comparison and the end, as a killed one does."""

    def work() -> None:
        with agreed("work", SOON) as compare:
            compare({})

    if dist.get_rank() != WRONG:
        return error_of(work)
    unfinished = agreed("work", SOON)
    unfinished.__enter__()({})
    return ""


def test_a_rank_that_ends_inside_is_named_within_the_timeout() -> None:
    told = run_ranks(4, _ends_inside)
    assert told.pop(WRONG) == ""
    assert told == [_did_not(WRONG, "come to the end of work")] * 3


def _no_interface() -> list[str]:
    """A network interface that rank 2 does not have, set where the default group exists already."""
    mesh = namedmesh.init_mesh(dp=2, tp=2)
    if dist.get_rank() == WRONG:
        os.environ["GLOO_SOCKET_IFNAME"] = "doesnotexist0"
    told = [error_of(lambda: namedmesh.init_mesh(a=2, b=2, timeout=SOON))]
    mesh.close()
    return told


def test_a_group_that_cannot_be_made_on_one_rank_fails_on_all() -> None:
    for (text,) in run_ranks(4, _no_interface):
        assert text.startswith("AgreementError: ")
        assert "rank 2 gave up on init_mesh: RuntimeError: " in text
        assert "Unable to find address for: " in text


def _keys_left() -> list[int]:
    """How many keys the store has after the third call, and after ten more, which are not all alike."""
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


def test_what_ranks_left_in_the_store_is_deleted_by_the_next_call() -> None:
    assert run_ranks(4, _keys_left) == [[0]] * 4


def _second_life() -> list[str]:
    """torchrun starts the ranks of a job again on the store of the first ones, which left their requests there."""
    rank = dist.get_rank()
    store = dist.PrefixStore(
        "job", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    )
    told = []
    for wrong in (False, True, False):  # the requests of one life are not those of the next
        dist.barrier()
        if wrong and rank == WRONG:  # in the life before it was killed after it had counted its question
            dist.PrefixStore("namedmesh", store).add("asked", 1)
        dist.barrier()
        meetings = Meetings(store, rank, 4)

        def call(meetings: Meetings = meetings, wrong: bool = wrong) -> None:
            with agreed("start", MINUTE, meetings) as compare:
                compare({"seed": 2 if wrong and rank == WRONG else 1})

        told.append(error_of(call))
    return told


def test_a_job_that_is_started_again_on_the_same_store_hears_nothing_of_its_first_life() -> None:
    text = "AgreementError: " + _differs("seed", "2", "1")
    assert run_ranks(4, _second_life) == [["", text, ""]] * 4
