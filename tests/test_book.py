"""What ``README.md`` and the book, ``examples/README.md``, show runs as it stands there, and prints what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train
from messages import error_of, printed_by
from ranks import fake_world, live_groups, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import Layout, NamedMesh, tensor_parallel, training
from namedmesh.__main__ import main
from namedmesh.training.pipelines import Pipeline

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BOOK = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
# What other packages print about themselves.
NOT_OURS = re.compile(r"^(\[\d{4}-|\{'train_runtime|DeepSpeed )")
PACKAGES = {
    "with_deepspeed.py": "deepspeed",
    "huggingface.py": "transformers",
    "fabric.py": "lightning_fabric",
}


def blocks(page: str, language: str, mark: str = "") -> list[Any]:
    """The blocks of a page in a language, or those below a mark; with what the mark says, where that has a group."""
    before = f"<!-- {mark} -->\n" if mark else ""
    return re.findall(rf"^{before}```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


# Blocks that a page gives a name, to copy into a file, or to import.
FILES: dict[str, str] = dict(blocks(BOOK, "python", r"file: (\S+)"))


# --- README.md --------------------------------------------------------------------------------------------------


def _run_code(sources: list[str]) -> tuple[Any, ...]:
    """The shape of what a rank holds of the weight of the first example, and of its gradient."""
    names: dict[str, Any] = {}
    models = []
    for source in sources:
        exec(compile(source, "README.md", "exec"), names)  # noqa: S102  the README is ours
        names["mesh"].close()
        models.append(names["model"])
    weight = models[0][0].weight
    return weight.to_local().shape, weight.grad.to_local().shape


def test_python_blocks_run_on_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block saves a checkpoint
    sources = blocks(README, "python")
    assert len(sources) == 3
    # 256 rows over tp=2, then over dp=4.
    assert run_ranks(8, _run_code, sources) == [((32, 64), (32, 64))] * 8


def test_without_a_launcher_an_error_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    text = (
        "No launcher has started this process, so it is a single-process run; start 8 processes with: torchrun "
        "--nproc-per-node 8 SCRIPT"
    )
    told = error_of(lambda: namedmesh.init_mesh(dp=-1, tp=2, device="cpu"))
    assert told.startswith("LayoutError: ")
    assert told.endswith(text)


def test_python_sessions_show_what_python_answers() -> None:
    shown = "\n".join(blocks(README, "pycon"))
    test = doctest.DocTestParser().get_doctest(shown, {}, "README.md", "README.md", 0)
    assert len(test.examples) > 4
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_shown_disagreement_is_the_real_one() -> None:
    def call() -> str:
        return error_of(lambda: namedmesh.init_mesh(dp=4 if dist.get_rank() == 2 else 2, tp=-1))

    assert [f"namedmesh.errors.{told}\n" for told in run_ranks(4, call)] == [blocks(README, "text")[1]] * 4


def test_the_shown_training_is_the_real_one(tmp_path: Path) -> None:
    small = "--pp 2 --tp 2 --steps 1 --batch 4 --seq 16 --dim 32 --device cpu"
    words = f"{small} --data {ROOT / 'examples'} --checkpoint {tmp_path}".split()
    results = run_ranks(8, lambda: printed_by(lambda: train.main(words))[:2], init=False)
    told = results[0][1]
    assert results == [(0, told)] + [(0, "")] * 7
    layout, first, last = blocks(README, "text")[0].split("...\n")
    assert layout in told
    pattern = r"^step 1/\d+  loss (\d\.\d+) nats a byte$"
    (real,) = re.findall(pattern, told, flags=re.MULTILINE)
    (shown,) = re.findall(pattern, first, flags=re.MULTILINE)
    assert float(real) == pytest.approx(float(shown), abs=0.2)  # of another text
    going_on = last[last.index("to go on") :]
    assert going_on.replace("checkpoints", str(tmp_path)) in told


def test_it_is_short_and_has_two_commands_that_are_marked() -> None:
    assert len(README.splitlines()) <= 165
    assert len([line for line in blocks(README, "python")[0].splitlines() if line.strip()]) <= 10
    commands = blocks(README, "bash", r"command: (\w+)")
    assert [(name, command.count("\n")) for name, command in commands] == [("train", 1), ("test", 1)]
    assert len(blocks(README, "bash")) == 2


# --- the book ---------------------------------------------------------------------------------------------------


def sessions() -> list[Any]:
    """The console blocks, each a list of commands with what they print, and the package that they need."""
    found = []
    for block in blocks(BOOK, "console"):
        steps = [step.partition("\n") for step in block.removeprefix("$ ").split("\n$ ")]
        script = re.search(r"\w+\.py|namedmesh \w+", block)
        assert script is not None, block
        name = script.group()
        commands = [(command, shown) for command, _, shown in steps]
        package = PACKAGES.get(name)
        marks = pytest.mark.oracle(package) if package else ()
        found.append(pytest.param(commands, package, id=name, marks=marks))
    return found


def run(words: list[str]) -> str:
    """Run a script or a command of ours in this process, and return what it prints."""
    sys.argv = words[1:]
    if words[0] == "namedmesh":
        _, out, err = printed_by(lambda: main(words[1:]))
        return out + err
    script = Path(words[1]).resolve() if words[1] in FILES else ROOT / words[1]
    sys.path.insert(0, str(script.parent))
    _, out, _ = printed_by(lambda: runpy.run_path(str(script), run_name="__main__"))
    return "".join(line for line in out.splitlines(keepends=True) if not NOT_OURS.match(line))


def printed(command: str) -> str:
    """What a command of the book prints, on all of its ranks."""
    words = shlex.split(command)
    ranks = 1
    if words[0] == "torchrun":
        ranks = int(words[2])
        words = ["python", *words[3:]]
    if words[1] == "-m":
        words = words[2:]
    # In a process of its own: one that has run a backward has threads, and should not be forked any more.
    return "".join(run_ranks(ranks, run, words, init=False))


def import_what_others_do(name: str) -> None:
    """Import once what every rank would import."""
    module = importlib.import_module(name)
    if name == "deepspeed":
        # Its collectives in shared memory are compiled on first use, and nothing here is about them.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    elif name == "transformers":
        module.LlamaForCausalLM  # noqa: B018  loaded when it is asked for


@pytest.mark.parametrize(("commands", "package"), sessions())
def test_pages_show_what_is_printed(
    commands: list[tuple[str, str]], package: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, source in FILES.items():
        Path(name).write_text(source, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    if package is not None:
        import_what_others_do(package)
    for command, shown in commands:
        if not command.startswith("DS_BUILD_OPS=0 pip"):
            found = printed(command)
            assert doctest.OutputChecker().check_output(shown.strip(), found.strip(), doctest.ELLIPSIS), found


def test_a_job_that_goes_on_in_other_layouts_has_the_losses_of_one_that_stays() -> None:
    (shown,) = (block for block in blocks(BOOK, "console") if "checkpoints.py" in block)
    moved = re.findall(r"step (\d+) in .* loss (\S+)", shown)
    with tempfile.TemporaryDirectory() as folder:
        stayed = "".join(printed(f"python examples/checkpoints.py 1 {folder}") for _ in range(3))
    assert re.findall(r"step (\d+) in .* loss (\S+)", stayed) == moved
    assert len(moved) == 12


def test_every_script_and_every_file_has_a_page() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"train.py", "parallel.py"}
    assert scripts == set(re.findall(r"^\$ .*examples/(\w+\.py)", BOOK, flags=re.MULTILINE))
    for name in scripts:
        assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) <= 75
    shown = "\n".join(blocks(BOOK, "console"))
    for name in FILES:
        assert name in shown or f" {name.removesuffix('.py')}:" in shown


def test_shown_signatures_are_the_real_ones() -> None:
    """Of each line of a block of signatures the names of the arguments, in their order, with their defaults."""
    for line in "".join(blocks(BOOK, "python", "signatures")).splitlines():
        name, shown = re.match(r"([\w.]+)\((.*?)\)(?:  |$)", line).groups()  # type: ignore[union-attr]
        if name in {"mesh.add_view", "ExpertParallel", "parallelize", "fully_shard"}:
            continue  # a call as one writes it
        module, _, attribute = name.rpartition(".")
        owner: Any = {"training": training, "pipe": Pipeline}.get(module, tensor_parallel)
        function = getattr(owner, attribute)
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
        real = re.sub(r"=<function .*?>", "=...", str(inspect.Signature(bare))).replace("'", '"')
        assert f"({shown})" == real, name


LEGACY = """from megatron.core import mpu
def setup():
    mpu.initialize_model_parallel(2, 2, distributed_timeout_minutes=5)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        return mpu.get_pipeline_model_parallel_next_rank(), group.size()
    return mpu.get_tensor_model_parallel_rank(), group.size()
"""


def test_the_shown_migration_is_the_real_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LEGACY, encoding="utf-8")
    assert main(["migrate", "train.py"]) == 0
    command, _, shown = blocks(BOOK, "text")[0].partition("\n")
    assert command == "$ python -m namedmesh migrate train.py"
    assert capsys.readouterr().out.startswith(shown)


def _run_setup(path: str) -> Any:
    return runpy.run_path(path)["setup"]()


@pytest.mark.oracle("megatron.core", "einops")
def test_the_shown_program_runs_as_before(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LEGACY, encoding="utf-8")
    before = run_ranks(4, _run_setup, str(path))
    assert main(["migrate", "--write", "--force", str(path)]) == 0
    assert path.read_text(encoding="utf-8").count("current_mesh()") == 3
    assert run_ranks(4, _run_setup, str(path)) == before


def _without_fabric() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = torch.randn(16, 8)
    losses = []
    for _ in range(4):
        loss = (model(samples) - samples).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    return losses


def test_the_losses_for_fabric_are_those_of_one_process() -> None:
    page = BOOK.partition("## Lightning Fabric\n")[2].partition("\n## ")[0]
    (expected,) = run_ranks(1, _without_fabric, init=False)
    assert re.findall(r"^loss (\S+)$", page, flags=re.MULTILINE) == expected


def test_commands_that_are_not_shown_with_their_output_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two_hosts, partitions = (block.split() for block in blocks(BOOK, "bash"))
    options = two_hosts[two_hosts.index("examples/train.py") + 1 :]
    assert Layout(dp=-1, tp=train.parse(options).tp, world_size=16)["dp"] == 2
    layers = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    widths = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    config = {"model_type": "llama", **layers, **widths}
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(partitions[1:]) == 0


@pytest.mark.parametrize("folder", [".", "examples"])
def test_measured_figures_stand_where_the_measurements_are(folder: str) -> None:
    page = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\d+(?:\.\d+)? ?(?:%|times|ms|µs|GB|MB)\b", prose) == []
    for link in re.findall(r"\]\(([^)#]+)", prose):
        assert (ROOT / folder / link).exists(), link
    for anchor in re.findall(r"\]\((?:examples/README\.md)?#([\w-]+)\)", prose):
        titles = re.findall(r"^## (.+)$", BOOK, flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


# --- what the README's table, and the book, say of other libraries ------------------------------------------------


def _reduced_over_replicas() -> list[float]:
    """A replica of two ranks; what the other replicas have comes in by the hook, as torchft's groups do it."""
    mesh = namedmesh.init_mesh(dp_shard=2, device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp_shard"])
    gradients: list[torch.Tensor] = []
    sharded: Any = model
    sharded.set_all_reduce_hook(lambda reduced: gradients.append(reduced.mul_(0.5).clone()))
    model(torch.ones(2, 4)).sum().backward()
    weight: Any = model.weight
    whole = weight.grad.full_tensor()
    mesh.close()
    return [float(len(gradients)), *whole.unique().tolist()]


def test_a_hook_reduces_over_replicas_that_are_in_no_mesh() -> None:
    # The gradient is 2, of which the hook keeps half.
    assert run_ranks(2, _reduced_over_replicas) == [[1.0, 1.0]] * 2


def test_a_group_that_torch_does_not_know_is_refused() -> None:
    class Managed(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 2)  # type: ignore[call-arg]  # the other constructor

        def size(self) -> int:
            return 2

    with fake_world(4):
        mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
        groups = {"dp_replicate": Managed(), "tp": mesh.group("tp")}
        assert error_of(lambda: NamedMesh.from_groups(groups, device="cpu")) == (
            "LayoutError: the group of axis 'dp_replicate' is a Managed that is not registered in torch.distributed, so "
            "its ranks are not known; omit the axis"
        )
        mesh.close()


def made_twice(make: Callable[[], object]) -> tuple[int, int]:
    """How many more groups there are after a first call, and how many after a second one."""
    counts, kept = [live_groups()], []
    for _ in range(2):
        kept.append(make())
        counts.append(live_groups())
    return counts[1] - counts[0], counts[2] - counts[1]


def test_torch_makes_groups_again_and_takes_a_part_of_the_world() -> None:
    with fake_world(16):
        assert made_twice(lambda: init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))) == (2, 2)
        assert made_twice(lambda: namedmesh.init_mesh(dp=8, tp=2, device="cpu")) == (2, 0)
        assert init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).size() == 4
        with pytest.raises(RuntimeError):
            init_device_mesh("cpu", (-1, 2), mesh_dim_names=("dp", "tp"))
    assert "may lead to hanging" in (init_device_mesh.__doc__ or "")


@pytest.mark.oracle("megatron.core", "accelerate")
def test_megatron_leaves_groups_and_accelerate_has_five_axes() -> None:
    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")

    def initialize_and_destroy() -> None:
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        parallel_state.destroy_model_parallel()

    assert all(more > 0 for found in run_ranks(4, made_twice, initialize_and_destroy) for more in found)
    configuration: Any = importlib.import_module("accelerate").ParallelismConfig
    sizes = {field.name for field in fields(configuration) if field.name.endswith("_size")}
    assert sizes == {"dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size"}
