"""``launch.init``: devices and default groups, from real and invented environments."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from installing import interpreter
from messages import error_of, match_message
from ranks import fake_world, free_port, run_ranks

import namedmesh
from namedmesh import LaunchError, launch
from namedmesh.launch import default_group

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def simulate_devices(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Let torch find accelerators that this host does not have."""
    module = SimpleNamespace(device_count=lambda: count, is_available=lambda: count > 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: torch.device(kind) if count else None
    )


def _init_in_plain_python() -> list[object]:
    for name in VARIABLES:
        os.environ.pop(name, None)
    mesh = namedmesh.init_mesh(pp=1, dp=-1, tp=1, device="cpu")
    total = torch.ones(3)
    dist.all_reduce(total, group=mesh.group("pp"))
    facts = [dist.get_world_size(), dist.get_backend(), str(mesh.device), total.tolist()]
    is_shared = (
        mesh.group("dp") is mesh.group("tp") is mesh.flatten("dp", "tp").get_group() is dist.group.WORLD
    )
    mesh.close()
    return [*facts, is_shared, dist.is_initialized()]


def test_plain_python_is_a_single_process_run() -> None:
    assert run_ranks(1, _init_in_plain_python, init=False) == [[1, "gloo", "cpu", [1, 1, 1], True, True]]


@pytest.mark.usefixtures("no_launcher")
def test_a_world_size_of_one_without_a_rank_is_a_single_process_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch.init("cpu") == torch.device("cpu")
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_launcher")
def test_an_accelerator_without_a_backend_is_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac: torch would use gloo, which does not accept its tensors."""
    simulate_devices(monkeypatch, "mps", 1)
    for device, expected in ((None, "cpu"), ("mps", "mps:0")):
        assert launch.init(device) == torch.device(expected)
        dist.destroy_process_group()


def _init_with_gpus(release: str, local_ranks: dict[str, str], num_gpus: int) -> str:
    """Return the device that torch gets on a host with GPUs, or the error."""
    setattr(torch, "__version__", release)  # noqa: B010  mypy takes it for a constant
    del os.environ["LOCAL_RANK"]
    if os.environ["RANK"] in local_ranks:
        os.environ["LOCAL_RANK"] = local_ranks[os.environ["RANK"]]

    def stop(*_: object, device_id: object, **__: object) -> None:
        raise LaunchError(f"bound to {device_id}")

    with pytest.MonkeyPatch.context() as patch:
        simulate_devices(patch, "cuda", num_gpus)
        module: Any = torch.get_device_module("cuda")
        module.set_device = lambda _: None
        patch.setattr(dist, "init_process_group", stop)
        return error_of(launch.init)


def test_the_group_is_bound_to_the_device_if_torch_would_guess_it() -> None:
    # The job uses the last two of four GPUs. torch would guess the first two from the global ranks.
    local_ranks = {"0": "2", "1": "3"}
    for release, devices in (("2.14.1+cu130", ["None"] * 2), ("2.15.0.dev1", ["cuda:2", "cuda:3"])):
        errors = run_ranks(2, _init_with_gpus, release, local_ranks, 4, init=False)
        assert errors == [f"LaunchError: bound to {device}" for device in devices]


def _init_under_torchrun() -> tuple[str, int, timedelta]:
    mesh = namedmesh.init_mesh(dp=-1, tp=2, device="cpu", timeout=timedelta(seconds=44))
    group = mesh.group("tp")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return dist.get_backend(), int(total), group._get_backend(torch.device("cpu")).options._timeout


def test_the_environment_of_torchrun_is_used() -> None:
    assert run_ranks(4, _init_under_torchrun, init=False) == [("gloo", 2, timedelta(seconds=44))] * 4


def test_the_local_rank_selects_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_devices(monkeypatch, "cuda", 8)
    for local in range(8):
        environment = {"RANK": str(8 + local), "LOCAL_RANK": str(local)}
        assert default_group.choose_local_device(None, environment) == torch.device("cuda", local)
    assert default_group.choose_local_device("cpu", {"LOCAL_RANK": "3"}) == torch.device("cpu")
    assert default_group.choose_local_device("cuda:5", {"LOCAL_RANK": "3"}) == torch.device("cuda", 5)
    assert default_group.choose_local_device("cuda", {}) == torch.device("cuda", 0)


def test_the_only_visible_device_is_used_whatever_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_devices(monkeypatch, "cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    environment = {"LOCAL_RANK": "6", "CUDA_VISIBLE_DEVICES": "6"}
    assert default_group.choose_local_device(None, environment) == torch.device("cuda", 0)


class Accelerators:
    """A torch.cuda of a host with devices. It is initialized once a device is selected or requested."""

    def __init__(self, count: int, current: int | None = None) -> None:
        self.count = count
        self.current = current

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.current is not None

    def current_device(self) -> int:
        self.current = self.current or 0
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.current = device.index


@pytest.mark.parametrize(
    ("requested", "bound", "current", "expected"),
    [
        (None, None, None, ("cuda:3", 3)),  # not initialized: the local rank's device is selected
        ("cuda", None, None, ("cuda:3", 3)),
        (None, None, 1, ("cuda:1", 1)),  # initialized: the current device
        ("cuda", None, 1, ("cuda:1", 1)),
        (None, "cuda:2", 0, ("cuda:2", 0)),  # bound: that device, whichever is current
        ("cuda", "cuda:2", 0, ("cuda:2", 0)),
        ("cuda:1", "cuda:2", None, ("cuda:1", None)),  # the requested device, and nothing is selected
        ("cpu", "cuda:2", None, ("cpu", None)),
        ("cpu", None, None, ("cpu", None)),
    ],
)
def test_the_device_of_a_group_that_exists_already(
    monkeypatch: pytest.MonkeyPatch,
    requested: str | None,
    bound: str | None,
    current: int | None,
    expected: tuple[str, int | None],
) -> None:
    cuda = Accelerators(4, current)
    simulate_devices(monkeypatch, "cuda", 4)
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(default_group, "get_bound_device", lambda: bound and torch.device(bound))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (str(default_group.default_group_device(requested)), cuda.current) == expected


def test_the_device_of_a_gloo_group_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Accelerators(4)
    simulate_devices(monkeypatch, "cuda", 4)
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(default_group, "get_bound_device", lambda: None)
    assert (default_group.default_group_device(), cuda.current) == (torch.device("cpu"), None)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_launcher")
def test_a_mesh_uses_the_device_of_its_bound_group() -> None:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    mesh = namedmesh.init_mesh(dp=-1, tp=1)
    assert str(mesh.device) == "cuda:0"
    mesh.close()
    dist.destroy_process_group()


MESSAGES: list[tuple[int, dict[str, str], Any, str]] = [
    (
        2,
        {"LOCAL_RANK": "3"},
        None,
        "device cuda:3 does not exist: 2 cuda devices are visible to this process; start one process for each device, make "
        "more devices visible, or use device='cpu'",
    ),
    (
        0,
        {},
        "cuda:1",
        "device cuda:1 does not exist: 0 cuda devices are visible to this process; ...",
    ),
    (
        1,
        {"LOCAL_RANK": "first"},
        None,
        "LOCAL_RANK must be an int, as torchrun or another launcher sets it, got 'first'",
    ),
]


@pytest.mark.parametrize(("count", "environment", "device", "text"), MESSAGES)
def test_devices_that_do_not_exist_are_rejected(
    monkeypatch: pytest.MonkeyPatch, count: int, environment: dict[str, str], device: Any, text: str
) -> None:
    simulate_devices(monkeypatch, "cuda", count)
    with pytest.raises(LaunchError, match=match_message(text)):
        default_group.choose_local_device(device, environment)


ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    (
        {"RANK": "0"},
        "RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start the script with torchrun, or unset all of "
        "them for a single-process run",
    ),
    (
        {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        "RANK must be at least 0 and less than WORLD_SIZE, got RANK=4 and WORLD_SIZE=4",
    ),
    (
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "66000"},
        "MASTER_PORT must be at least 1 and less than 65536, got 66000",
    ),
    (
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"},
        "MASTER_PORT must be an int, ... got 'http'",
    ),
    *(
        (
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": address, "MASTER_PORT": "29500"},
            "MASTER_ADDR must be the name or the address of a host, without spaces, brackets or slashes, such as node0, "
            f"10.0.0.1 or ::1, got {address!r}",
        )
        for address in ("[::1]", " 127.0.0.1", "node0 ", "", "tcp://node0")
    ),
]


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(("environment", "text"), ENVIRONMENTS)
def test_incomplete_environments_are_rejected(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], text: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=match_message(text)):
        namedmesh.init_mesh(dp=-1, device="cpu")
    assert not dist.is_initialized()


def test_a_second_default_group_is_rejected() -> None:
    with fake_world(4):
        with pytest.raises(LaunchError) as caught:
            launch.init("cpu")
        assert str(caught.value) == (
            "the default process group exists already (backend fake, 4 ranks); call launch.init() once, or leave it "
            "to init_mesh()"
        )


def _init_as_rank_1(port: int) -> str:
    """Start rank 1 of a job whose rank 0 does not run."""
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return error_of(lambda: launch.init("cpu", timeout=timedelta(seconds=2)))


@pytest.mark.parametrize("accepts", [True, False])
def test_a_port_without_a_store_does_not_outlast_the_timeout(*, accepts: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not accepts:
            silent.close()
        # For a program that accepts the connection and never answers torch itself would wait for more than a minute.
        [text] = run_ranks(1, _init_as_rank_1, port, init=False, timeout=40)
    assert text == (
        f"LaunchError: 127.0.0.1, port {port} (MASTER_ADDR and MASTER_PORT) did not answer as the store of a job within "
        "2 s: rank 0 does not run, or another program uses this port; start all ranks, choose another MASTER_PORT, and check "
        "MASTER_ADDR"
    )


def _init_on_own_store(missing: int, wrong: dict[str, Any]) -> str:
    """Call init on all ranks but one, with wrong arguments on rank 1; rank 0 hosts the store."""
    rank = int(os.environ["RANK"])
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ["MASTER_PORT"] = str(PORTS[0])
    if rank == missing:
        return ""
    arguments: dict[str, Any] = {"device": "cpu", "timeout": timedelta(seconds=5)}
    text = error_of(lambda: launch.init(**(arguments | wrong if rank == 1 else arguments)))
    return text or str(dist.get_world_size())


PORTS: list[int] = []


def test_the_backends_of_the_ranks_are_compared() -> None:
    PORTS[:] = [free_port()]
    text = "AgreementError: backend differs between ranks: gloo on ranks 0, 2; fake on rank 1; give every rank the same"
    assert run_ranks(3, _init_on_own_store, -1, {"backend": "fake"}, init=False) == [text] * 3


def test_a_device_that_does_not_exist_on_one_rank_is_reported_on_all_ranks() -> None:
    PORTS[:] = [free_port()]
    reports = run_ranks(3, _init_on_own_store, -1, {"device": "cuda:99"}, init=False)
    mistake = reports[1].removeprefix("LaunchError: ")
    assert mistake.startswith("device cuda:99 does not exist")
    assert reports[0] == reports[2] == f"AgreementError: rank 1 failed in launch.init: {mistake}"


@pytest.mark.parametrize("missing", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_does_not_start_is_reported(missing: int) -> None:
    PORTS[:] = [free_port()]
    reports = run_ranks(3, _init_on_own_store, missing, {}, init=False)
    assert reports.pop(missing) == ""
    for text in reports:
        if missing:
            assert text.startswith(
                "AgreementError: rank 2 of 3 did not call launch.init within 5 s; make sure "
            )
        else:
            assert text.startswith(
                f"LaunchError: 127.0.0.1, port {PORTS[0]} (MASTER_ADDR and MASTER_PORT) did not "
            )


@pytest.mark.gpu
@pytest.mark.usefixtures("no_launcher")
def test_a_single_process_run_on_a_gpu() -> None:
    mesh = namedmesh.init_mesh(dp=-1, tp=1)
    assert (dist.get_backend(), str(mesh.device)) == ("nccl", "cuda:0")
    total = torch.ones(3, device=mesh.device)
    dist.all_reduce(total, group=mesh.group("dp"))
    assert total.tolist() == [1, 1, 1]
    mesh.close()
    dist.destroy_process_group()


@pytest.mark.ci
def test_a_script_ends_without_warnings() -> None:
    code = (
        "import namedmesh, torch.distributed as dist\n"
        "mesh = namedmesh.init_mesh(dp=-1, device='cpu')\n"
        "print(mesh.explain())\n"
        "mesh.close()\n"
        "dist.destroy_process_group()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    run = interpreter("-W", "error::UserWarning:namedmesh", "-c", code, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    assert "rank 0 of dp=1 (1 rank)\n  dp: 0 of 1, alone\n" in run.stdout
