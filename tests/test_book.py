"""Every command of ``examples/README.md`` runs on as many ranks as it says, and prints what the page shows."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import json
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import train
from ranks import run_ranks

from namedmesh import Layout, tensor_parallel, training
from namedmesh.__main__ import main
from namedmesh.training.pipelines import Pipeline

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
# What other packages print about themselves.
NOT_OURS = re.compile(r"^(\[\d{4}-|\{'train_runtime|DeepSpeed )")
MARKS = {
    "with_deepspeed.py": pytest.mark.oracle("deepspeed"),
    "huggingface.py": pytest.mark.oracle("transformers"),
    "fabric.py": pytest.mark.oracle("lightning_fabric"),
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


# Blocks that a page gives a name, to copy into a file, or to import.
FILES = dict(
    re.findall(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
)


def sessions() -> list[Any]:
    """The console blocks, each a list of commands with what they print."""
    found = []
    for block in blocks("console"):
        steps = [step.partition("\n") for step in block.removeprefix("$ ").split("\n$ ")]
        script = re.search(r"\w+\.py|namedmesh \w+", block)
        assert script is not None, block
        name = script.group()
        commands = [(command, shown) for command, _, shown in steps]
        found.append(pytest.param(commands, id=name, marks=[MARKS[name]] if name in MARKS else []))
    return found


def run(words: list[str]) -> str:
    """Run a script or a command of ours in this process, and return what it prints."""
    out = io.StringIO()
    sys.argv = words[1:]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out if words[0] == "namedmesh" else sys.stderr),
    ):
        if words[0] == "namedmesh":
            main(words[1:])
        else:
            script = Path(words[1]).resolve() if words[1] in FILES else ROOT / words[1]
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
    return "".join(line for line in out.getvalue().splitlines(keepends=True) if not NOT_OURS.match(line))


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
    if name == "deepspeed":
        # Its collectives in shared memory are compiled on first use, and nothing here is about them.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    elif name == "transformers":
        importlib.import_module("transformers").LlamaForCausalLM  # noqa: B018  loaded when it is asked for
    else:
        importlib.import_module(name)


@pytest.mark.parametrize("commands", sessions())
def test_pages_show_what_is_printed(
    commands: list[tuple[str, str]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, source in FILES.items():
        Path(name).write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for mark in request.node.iter_markers("oracle"):
        for package in mark.args:
            import_what_others_do(package)
    for command, shown in commands:
        if not command.startswith("DS_BUILD_OPS=0 pip"):
            found = printed(command)
            assert doctest.OutputChecker().check_output(shown.strip(), found.strip(), doctest.ELLIPSIS), found


def test_a_job_that_goes_on_in_other_layouts_has_the_losses_of_one_that_stays() -> None:
    (shown,) = (block for block in blocks("console") if "checkpoints.py" in block)
    moved = re.findall(r"step (\d+) in .* loss (\S+)", shown)
    with tempfile.TemporaryDirectory() as folder:
        stayed = "".join(printed(f"python examples/checkpoints.py 1 {folder}") for _ in range(3))
    assert re.findall(r"step (\d+) in .* loss (\S+)", stayed) == moved
    assert len(moved) == 12


def test_every_script_and_every_file_has_a_page() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"train.py", "parallel.py"}
    assert scripts == set(re.findall(r"^\$ .*examples/(\w+\.py)", TEXT, flags=re.MULTILINE))
    for name in scripts:
        assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) <= 75
    shown = "\n".join(blocks("console"))
    for name in FILES:
        assert name in shown or f" {name.removesuffix('.py')}:" in shown


def test_shown_signatures_are_the_real_ones() -> None:
    """Of each line of a block of signatures the names of the arguments, in their order, with their defaults."""
    found = re.findall(r"^<!-- signatures -->\n```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    for line in "".join(found).splitlines():
        name, shown = re.match(r"([\w.]+)\((.*?)\)(?:  |$)", line).groups()  # type: ignore[union-attr]
        if name in {"mesh.add_view", "ExpertParallel", "parallelize", "fully_shard"}:
            continue  # a call as one writes it
        module, _, attribute = name.rpartition(".")
        function: Any = getattr(
            {"training": training, "pipe": Pipeline}.get(module, tensor_parallel), attribute
        )
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
        real = re.sub(r"=<function .*?>", "=...", str(inspect.Signature(bare))).replace("'", '"')
        assert f"({shown})" == real, name


LEGACY = """from megatron.core import mpu
mpu.initialize_model_parallel(2, 4, context_parallel_size=2)
group = mpu.get_data_parallel_group(with_context_parallel=True)
if mpu.is_pipeline_last_stage(ignore_virtual=True):
    send_to = mpu.get_pipeline_model_parallel_next_rank()
"""


def test_the_shown_migration_is_the_real_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LEGACY, encoding="utf-8")
    assert main(["migrate", "train.py"]) == 0
    command, _, shown = blocks("text")[0].partition("\n")
    assert command == "$ python -m namedmesh migrate train.py"
    assert capsys.readouterr().out.startswith(shown)


def test_commands_that_are_not_shown_with_their_output_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two_hosts, partitions = (block.split() for block in blocks("bash"))
    options = two_hosts[two_hosts.index("examples/train.py") + 1 :]
    assert Layout(dp=-1, tp=train.parse(options).tp, world_size=16)["dp"] == 2
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    }
    config = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, **sizes}
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(partitions[1:]) == 0


@pytest.mark.parametrize("page", ["README.md", "examples/README.md"])
def test_measured_figures_stand_where_the_measurements_are(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\d+(?:\.\d+)? ?(?:%|times|ms|µs|GB|MB)\b", prose) == []
    for link in re.findall(r"\]\(([^)#]+)", prose):
        assert (ROOT / page).parent.joinpath(link).exists(), link
    for anchor in re.findall(r"\]\((?:examples/README\.md)?#([\w-]+)\)", prose):
        titles = re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
