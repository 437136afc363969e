"""Checkpoints and other programs: torch's tools and torchtitan read ours, and we read theirs."""

from __future__ import annotations

import os
import re
import resource
import struct
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_checks import collect_values, make_adam, max_difference, run_in_turn
from messages import error_of
from ranks import run_ranks
from tensors import full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tp_compare import get_grad

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """A model with a submodule of the name "model", a buffer and a weight with two names."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"up": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6)})
        self.embed = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(random_tensor(*parameter.shape, seed=7) * value)

    def stepped(self) -> torch.optim.Optimizer:
        optimizer = make_adam(self.parameters())
        for parameter in self.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


def check_equal(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    assert [name for (name, value), found in pairs if not torch.equal(value, found)] == []


def test_torch_reads_a_checkpoint_without_namedmesh(tmp_path: Path) -> None:
    net = Net(1.0)
    optimizer = net.stepped()
    training.save(tmp_path / "one", None, net, optimizer, step=3)
    for prefix in (True, False):  # torchtitan's checkpoints have no "model."
        other = Net(2.0)
        values = other.state_dict()
        dcp.load({"model": values} if prefix else values, checkpoint_id=tmp_path / "one", no_dist=True)
        check_equal(other, net)
    other = Net(2.0)
    moments = {name: torch.zeros_like(parameter) for name, parameter in other.named_parameters()}
    nested = {"optimizer": {"state": {name: {"exp_avg": moment} for name, moment in moments.items()}}}
    dcp.load(nested, checkpoint_id=tmp_path / "one", no_dist=True)
    for name, parameter in net.named_parameters():
        assert torch.equal(moments[name], optimizer.state[parameter]["exp_avg"])
    dcp_to_torch_save(tmp_path / "one", tmp_path / "one.pt")
    converted = torch.load(tmp_path / "one.pt", weights_only=True)
    assert set(converted) == {"model", "optimizer", "namedmesh"}
    other = Net(2.0)
    other.load_state_dict(converted["model"])
    check_equal(other, net)


def test_weights_of_other_programs_are_loaded(tmp_path: Path) -> None:
    net = Net(1.0)
    weights = net.state_dict()
    states = {"state": {"head.weight": {"exp_avg": torch.ones(5, 6)}}, "param_groups": [{"lr": 0.1}]}
    folders: dict[str, dict[str, Any]] = {
        "plain": {"model": weights},
        "named": {"net": weights, "optimizer": states, "step": 3},
        "flat": dict(weights),
        "torchtitan": {**weights, "optimizer": states, "train_state": {"step": torch.tensor(3)}},
        "nested": {"app": {"model": weights, "optim": states}},
        "compiled": {"model": {f"_orig_mod.{name}": value for name, value in weights.items()}},
    }
    for name, values in folders.items():
        dcp.save(values, checkpoint_id=tmp_path / name, no_dist=True)
        other = Net(2.0)
        loaded = training.load(tmp_path / name, None, other)
        check_equal(other, net)
        assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
        adam = make_adam(other.parameters())
        assert error_of(partial(training.load, tmp_path / name, None, other, adam)) == (
            f"CheckpointError: the checkpoint {tmp_path}/{name}: has no optimizer that namedmesh saved; load it without the "
            "optimizer"
        )
    larger = Net(2.0)
    larger.new = nn.Linear(1, 1)
    assert "'new.weight', 'new.bias': not in" in error_of(
        lambda: training.load(tmp_path / "plain", None, larger)
    )


class FusedQKV(nn.Module):
    """A fused parameter that the state dict has in three parts, interleaved, as torchtitan's default."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(4, 6, bias=False)
        self._register_state_dict_hook(self._split)  # type: ignore[no-untyped-call]  # torch's
        self.register_load_state_dict_pre_hook(self._join)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split(_: Any, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        parts = state.pop(prefix + "wqkv.weight").view(2, 3, 4).transpose(0, 1).reshape(3, 2, 4)
        state.update({f"{prefix}w{name}.weight": part for name, part in zip("qkv", parts, strict=True)})

    @staticmethod
    def _join(_: Any, state: dict[str, Tensor], prefix: str, *__: Any) -> None:
        parts = [state.pop(f"{prefix}w{name}.weight") for name in "qkv"]
        state[prefix + "wqkv.weight"] = torch.stack(parts).transpose(0, 1).reshape(6, 4)


def test_a_parameter_that_the_state_dict_splits_resumes_with_its_optimizer(tmp_path: Path) -> None:
    def job() -> tuple[FusedQKV, torch.optim.Optimizer]:
        model = FusedQKV()
        return model, make_adam(model.parameters())

    model, optimizer = job()
    model.wqkv.weight.grad = torch.ones(6, 4)
    optimizer.step()
    training.save(tmp_path / "one", None, model, optimizer)
    training.load(tmp_path / "one", None, *(other := job()))
    assert torch.equal(other[0].wqkv.weight, model.wqkv.weight)
    found, expected = (dict(each.state_dict()["state"][0]) for each in (other[1], optimizer))
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    values = {f"w{name}.weight": torch.zeros(2, 4) for name in "qkv"}
    dcp.load({"model": values}, checkpoint_id=tmp_path / "one", no_dist=True)
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())


# --- tensors -----------------------------------------------------------------------------------


class Twice(Tensor):
    """A tensor of another class, such as torchao's, which needs code to be read."""

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.content = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return Twice(args[0].content)


def test_what_a_load_could_not_restore_is_refused_by_the_save(tmp_path: Path) -> None:
    eye = torch.eye(4)
    tensors: dict[str, Callable[[], Tensor]] = {
        "tensor of torch.float32, torch.sparse_coo": eye.to_sparse,
        "tensor of torch.float32, torch.sparse_csr": eye.to_sparse_csr,
        "tensor of torch.quint8, torch.strided": lambda: torch.quantize_per_tensor(eye, 0.1, 0, torch.quint8),
        "Twice": lambda: Twice(eye),
    }
    for kind, make in tensors.items():
        model = nn.Module()
        with warnings.catch_warnings():  # torch warns about sparse and quantized tensors
            warnings.simplefilter("ignore")
            model.register_buffer("table", make())
        message = error_of(partial(training.save, tmp_path / "one", None, model))
        assert message.startswith(f"CheckpointError: 'table': a {kind} cannot be saved, because")
        optimizer = torch.optim.SGD([weight := nn.Parameter(torch.zeros(2))])
        optimizer.state[weight]["table"] = model.table
        owner = nn.ParameterDict({"weight": weight})
        message = error_of(partial(training.save, tmp_path / "one", None, owner, optimizer))
        assert message.startswith(f"CheckpointError: 'weight:table': a {kind} cannot be saved, because")
    assert not (tmp_path / "one").exists()


ODD_TENSORS = {
    "complex": torch.randn(6, 4, dtype=torch.complex64),
    "fp8": torch.randn(6, 4).to(torch.float8_e4m3fn),
    "bool": torch.randn(6, 4) > 0,
    "bfloat16": torch.randn(5, 4, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.5),
    "../up": torch.ones(2),
    "/absolute": torch.ones(2) * 2,
    "new\nline": torch.ones(2) * 3,
    "dots.and.model.dots": torch.ones(2) * 4,
    "ü:%3A\0": torch.ones(2) * 5,
}


def odd_tensors_and_names_round_trip(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")

    def make(scale: int) -> nn.Module:
        model = nn.Module()
        for name, value in ODD_TENSORS.items():
            local = value.clone()
            if not scale:
                local.zero_()
            if local.ndim == 2:
                local = distribute_tensor(local, mesh["dp"], [Shard(0)], src_data_rank=None)
            model._buffers[name] = local  # nn.Module refuses dots in names, and state_dict() does not
        return model

    training.save(root / "one" / "two", mesh, make(1))
    training.load(root / "one" / "two", mesh, other := make(0))
    for name, value in ODD_TENSORS.items():
        found = other.state_dict()[name]
        full = (
            found.full_tensor() if isinstance(found, DTensor) and found.dtype != torch.float8_e4m3fn else None
        )
        if full is None:
            full = (
                distribute_tensor(value, mesh["dp"], [Shard(0)], src_data_rank=None)
                if value.ndim == 2
                else value
            )
            one, two = (each.to_local() if isinstance(each, DTensor) else each for each in (found, full))
            assert torch.equal(
                one.float() if value.ndim == 2 else one, two.float() if value.ndim == 2 else two
            ), name
        else:
            assert torch.equal(full, value), name
    mesh.close()
    assert [path.name for path in root.iterdir()] == ["one"]
    assert all(
        path.name == ".metadata" or path.name.startswith("__") for path in (root / "one" / "two").iterdir()
    )


def sharded_weights_are_read_by_torch_in_one_process(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    net: Any = Net(1.0)
    fully_shard(net, mesh=mesh["dp"])
    net.embed.weight = nn.Parameter(net.embed.weight.detach())
    net.head.weight = net.embed.weight
    expected = {name: full_tensor(value).clone() for name, value in net.state_dict().items()}
    training.save(root / "one", mesh, net)
    if mesh.rank() == 0:
        values = Net(2.0).state_dict()
        dcp.load({"model": values}, checkpoint_id=root / "one", no_dist=True)
        assert all(torch.equal(values[name], value) for name, value in expected.items())
    mesh.close()


def test_shards_round_trip_and_torch_reads_them(tmp_path: Path) -> None:
    cases = (odd_tensors_and_names_round_trip, sharded_weights_are_read_by_torch_in_one_process)
    run_ranks(2, run_in_turn, cases, tmp_path)


# --- checksums, cost and progress ----------------------------------------------------------------


@pytest.mark.parametrize("stride", [37, pytest.param(3, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_the_directory_of_an_archive_is_detected(tmp_path: Path, stride: int) -> None:
    """torch.load obeys the directory at the end of an archive: method, attributes, offsets."""
    model = nn.Module()
    model.register_buffer("seen", torch.arange(6.0))
    training.save(tmp_path / "one", None, model)
    (file,) = (tmp_path / "one").glob("*.distcp")
    contents = file.read_bytes()
    metadata = dcp.FileSystemReader(tmp_path / "one").read_metadata()
    (place,) = (at for index, at in metadata.storage_data.items() if index.fqn == "model.seen")
    archive = contents[place.offset : place.offset + place.length]
    directory = struct.unpack_from("<I", archive, len(archive) - 6)[0]
    for bit in range(8 * directory, 8 * place.length, stride):
        flipped = bytearray(contents)
        flipped[place.offset + bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        other: Any = nn.Module()
        other.register_buffer("seen", torch.full((6,), 9.0))
        assert error_of(partial(training.load, tmp_path / "one", None, other)).startswith("CorruptedError: ")
        assert torch.equal(other.seen, torch.full((6,), 9.0))
    file.write_bytes(contents)
    training.load(tmp_path / "one", None, other)
    assert torch.equal(other.seen, torch.arange(6.0))


def load_with_little_memory(path: Path) -> None:
    """Load 192 MiB, with a limit of 100 MiB for new memory that is not a file's."""
    model = nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(24))
    training.load(path / "small", None, nn.Linear(1, 1))
    (used,) = re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    limit = 1024 * int(used) + (100 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    training.load(path / "large", None, model)


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limits of memory")
def test_a_load_needs_little_more_memory_than_the_model(tmp_path: Path) -> None:
    training.save(tmp_path / "small", None, nn.Linear(1, 1))
    training.save(
        tmp_path / "large", None, nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(24))
    )
    child = os.fork()
    if child == 0:
        status = 1
        try:
            load_with_little_memory(tmp_path)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_tensors_are_loaded_in_place_unless_a_module_has_hooks(tmp_path: Path) -> None:
    net, other = Net(1.0), Net(2.0)
    optimizer, states = net.stepped(), other.stepped()
    training.save(tmp_path / "one", None, net, optimizer)
    places = {value.data_ptr() for value in (*other.parameters(), *other.buffers())}
    moments = {states.state[parameter]["exp_avg"].data_ptr() for parameter in other.parameters()}

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("nn.Module.load_state_dict is quadratic in the number of children of one module")

    fail.__module__ = nn.Module.__module__  # it is not a method of the user
    with mock.patch.object(nn.Module, "load_state_dict", fail):
        training.load(tmp_path / "one", None, other, states)
    assert places == {value.data_ptr() for value in (*other.parameters(), *other.buffers())}
    assert moments == {states.state[parameter]["exp_avg"].data_ptr() for parameter in other.parameters()}
    assert max_difference(collect_values(other, states), collect_values(net, optimizer)) == 0
    hooked, calls = Net(2.0), []
    hooked.model.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    training.load(tmp_path / "one", None, hooked)
    check_equal(hooked, net)
    assert calls == ["loaded"]


def test_long_work_shows_one_line_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = Net(1.0)
    seconds = iter(range(0, 1000, 3))
    with mock.patch("time.monotonic", side_effect=seconds):
        training.save(tmp_path / "quiet", None, net)
        assert capsys.readouterr().err == ""
        with mock.patch("sys.stderr.isatty", return_value=True, create=True):
            training.save(tmp_path / "one", None, net)
            saving = capsys.readouterr().err
            training.load(tmp_path / "one", None, net)
            loading = capsys.readouterr().err
    for label, shown in (("saving", saving), ("loading", loading)):
        assert shown.startswith(f"\r{label} {tmp_path}/one: 0 MB on rank 0, ")
        assert shown.count("\n") == 1
        assert shown.endswith(" s\n")


def test_gradients_that_a_step_has_used_are_not_saved(tmp_path: Path) -> None:
    """A loop may call zero_grad() long after the step, and a new job has no gradients at first."""
    expected: list[bool] = []
    found: list[bool] = []
    for number, order in enumerate(("backward step", "backward", "backward step backward", "")):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for call in order.split():
            if call == "backward":
                model(torch.ones(1, 2)).sum().backward()
            else:
                optimizer.step()
        training.save(tmp_path / str(number), None, model, optimizer)
        resumed = nn.Linear(2, 2)
        training.load(tmp_path / str(number), None, resumed, torch.optim.AdamW(resumed.parameters()))
        expected.append(order.endswith("backward"))
        found.append(resumed.weight.grad is not None)
        if found[-1]:
            assert torch.equal(get_grad(resumed.weight), get_grad(model.weight))
    assert found == expected == [False, True, True, False]


def save_both_ends(path: str) -> bool:
    """Return whether both ends of a tie on one rank have their optimizer state after a load."""
    mesh = namedmesh.init_mesh(pp=1, dp=2, device="cpu")
    states = []
    for resumes in (False, True):
        ends = nn.ModuleList(nn.Linear(4, 6, bias=False) for _ in range(2)).double()
        for end in ends:
            nn.init.constant_(end.weight, 1.0)  # type: ignore[arg-type]
        sum_gradients = training.tie_stages(ends[0].weight, ends[1].weight, mesh)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(ends.parameters(), lr=0.1)
        if resumes:
            training.load(path, mesh, ends, optimizer)
        else:
            ends[0](torch.ones(1, 4).double()).square().sum().backward()
            sum_gradients()
            optimizer.step()
            training.save(path, mesh, ends, optimizer)
        states.append([optimizer.state[param]["exp_avg"].clone() for param in ends.parameters()])
        states[-1] += [param.detach().clone() for param in ends.parameters()]
    mesh.close()
    return all(map(torch.equal, *states)) and len(states[0]) == 4


def test_both_ends_of_a_tie_on_one_rank_resume(tmp_path: Path) -> None:
    assert run_ranks(2, save_both_ends, str(tmp_path / "saved")) == [True, True]
