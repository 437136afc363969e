"""The guide, ``examples/``: every block of its pages runs and prints what is shown; form, links and signatures hold.

``pages.py`` has the marks that say what happens with a block.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import json
import re
import runpy
import shlex
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from messages import capture_printed
from pages import (
    PAGES,
    README,
    ROOT,
    Page,
    all_blocks,
    anchor,
    contains,
    count_words,
    find_blocks,
    paragraphs,
    sentences,
    without_blocks,
)
from ranks import run_ranks
from torch import nn

import namedmesh
from namedmesh import Layout, NamedMesh, _errors, compat, launch, plan, tensor_parallel, training
from namedmesh.__main__ import main

# The packages that a console block needs, by a script or file in it.
PACKAGES = {
    "with_deepspeed.py": "deepspeed",
    "huggingface.py": "transformers",
    "shard_hf.py": "transformers",
    "load_hf.py": "transformers",
    "hf_context.py": "transformers",
    "adopt_hf.py": "transformers",
    "lora.py": "peft",
    "titan.py": "torchtitan",
    "fabric.py": "lightning_fabric",
    "share_megatron.py": "megatron.core",
    "share_deepspeed.py": "deepspeed",
    "share_fairscale.py": "fairscale",
    "share_accelerate.py": "accelerate",
}
# Scripts of many ranks or seconds, whose features have tests of their own on fewer ranks.
SLOW = {"hsdp_tp.py", "pretrain.py", "published.py", "rl.py", "checkpoints.py"}
# What other packages print about themselves.
NOT_OURS = re.compile(r"^(\[\d{4}-|\{'train_runtime|DeepSpeed |> initializing )")

# The pages that follow the template: all except the index.
GUIDE = [page for page in PAGES if page.name != "README"]
SECTIONS = (
    "Minimal example",
    "Run it",
    "How it works",
    "Calls on this page",
    "Common errors",
    "Limits",
    "See also",
)
# Pages to look something up, which have no example of their own.
LISTS = {"guide/changes_in_torch", "guide/glossary", "integrations/others"}
MARKS = r"file: \S+|signatures|from: \S+|run: \S+"

each_page = pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
each_guide_page = pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in GUIDE])


# --- what the pages show is what happens ------------------------------------------------------------------------


def sessions() -> list[Any]:
    """The console blocks of README.md and of all pages: the page, the commands with their output, and a package they need."""
    found = []
    for page in (README, *PAGES):
        for block in page.blocks("console"):
            steps = [step.partition("\n") for step in block.removeprefix("$ ").split("\n$ ")]
            commands = [(command, shown) for command, _, shown in steps]
            names = re.findall(r"\w+\.py|namedmesh \w+|\w+:\w+", block)
            packages = [PACKAGES[name] for name in names if name in PACKAGES]
            package = packages[0] if packages else None
            marks = [pytest.mark.oracle(package)] if package else []
            if not SLOW.isdisjoint(names):
                marks.append(pytest.mark.slow)
            else:
                marks.append(pytest.mark.ci)
            title = f"{page.name}-{names[0] if names else 'python'}"
            found.append(pytest.param(page, commands, package, id=title, marks=marks))
    return found


def run(words: list[str]) -> str:
    """Run a script or a namedmesh command in this process, and return what it prints."""
    sys.argv = words[1:]
    if words[0] == "namedmesh":
        if words[1] == "run":
            warnings.simplefilter("ignore")  # packages that the script imports warn about themselves
        _, out, err = capture_printed(lambda: main(words[1:]))
        return out + err
    script = Path(words[1]).resolve()
    if not script.exists():
        script = ROOT / words[1]
    sys.path.insert(0, str(script.parent))
    _, out, _ = capture_printed(lambda: runpy.run_path(str(script), run_name="__main__"))
    return "".join(line for line in out.splitlines(keepends=True) if not NOT_OURS.match(line))


def printed(command: str) -> str:
    """What a command of a page prints, on all of its ranks."""
    words = shlex.split(command.removeprefix("OMP_NUM_THREADS=1 "))  # set for all tests
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
    importlib.import_module(name)
    if name == "deepspeed":
        # Its collectives in shared memory are compiled on first use, and nothing here is about them.
        vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    elif name in {"transformers", "peft"}:
        # transformers loads the modules of a model at the first use of its name.
        importlib.import_module("transformers").LlamaForCausalLM  # noqa: B018


@pytest.mark.parametrize(("page", "commands", "package"), sessions())
def test_commands_print_what_is_shown(
    page: Page,
    commands: list[tuple[str, str]],
    package: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, source in page.files.items():
        Path(name).write_text(source, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    if package is not None:
        import_what_others_do(package)
    for command, shown in commands:
        if "pip install" not in command:
            output = printed(command)
            assert doctest.OutputChecker().check_output(shown.strip(), output.strip(), doctest.ELLIPSIS), (
                output
            )


def failed_examples(source: str, name: str) -> tuple[int, str]:
    """How many examples of a Python session answer something else, and what they answer."""
    test = doctest.DocTestParser().get_doctest(source, {}, name, name, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    result, out, _ = capture_printed(lambda: runner.run(test))
    return result.failed, out


@each_page
def test_python_sessions_show_what_python_answers(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = page.blocks("pycon")
    if sources:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        (result,) = run_ranks(1, failed_examples, "\n".join(sources), page.name, init=False)
        assert result == (0, "")


def test_shown_signatures_are_the_real_ones() -> None:
    """Each line has the names of the arguments, in their order, with their defaults."""
    for block in find_blocks("python", "signatures"):
        joined = re.sub(r"\n\s+", " ", block).replace("( ", "(")
        for line in joined.strip().splitlines():
            name, shown = re.match(r"([\w.]+)\((.*?),?\)(?:  |$)", line).groups()  # type: ignore[union-attr]
            parameters = dict(inspect.signature(find_call(name)).parameters)
            parameters.pop("self", None)
            bare = [value.replace(annotation=inspect.Parameter.empty) for value in parameters.values()]
            real = re.sub(r"=<[^>]*>", "=...", str(inspect.Signature(bare))).replace("'", '"')
            assert f"({shown})" == real, name


def find_call(name: str) -> Any:
    """Return the function or class that a line of signatures names, e.g. ``mesh.group`` or ``parallelize``."""
    owners: dict[str, Any] = {
        "namedmesh": namedmesh,
        "training": training,
        "launch": launch,
        "plan": plan,
        "mesh": NamedMesh,
        "NamedMesh": NamedMesh,
        "layout": Layout,
        "Layout": Layout,
        "pipe": training.Pipeline,
        "checkpoints": training.CheckpointManager,
    }
    first, _, attribute = name.rpartition(".")
    if first in owners:
        return getattr(owners[first], attribute)
    if first:
        return getattr(importlib.import_module(f"{compat.__name__}.{first}"), attribute)
    for module in (tensor_parallel, namedmesh, training, plan):
        if name in module.__all__:
            return getattr(module, name)
    raise AssertionError(f"no public name {name}")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in (README, *GUIDE)])
def test_every_python_block_has_a_mark_that_makes_a_test_of_it(page: Page) -> None:
    console = "\n".join(page.blocks("console"))
    for block in all_blocks(page.text):
        if block.language == "python":
            assert re.fullmatch(MARKS, block.mark), f"{MARKS}:\n{block.source}"
            kind, _, name = block.mark.partition(": ")
            if kind == "file":
                module = name.removesuffix(".py")
                imported = any(
                    re.search(rf"\bimport {module}\b|\bfrom {module}\b", x) for x in page.files.values()
                )
                assert name in console or f" {module}:" in console or imported, f"{name} is not run"
            elif kind == "from":
                source = page.files.get(name) or (ROOT / name).read_text(encoding="utf-8")
                assert contains(source, block.source), f"{name} does not have:\n{block.source}"


@functools.cache
def source_strings() -> str:
    """Return the strings of the source except docstrings, one in a line; f-strings in their literal parts."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
        found += [" ".join(node.value.split()) for node in constants if isinstance(node.value, str)]
    return "\n".join(found)


def find_unknown_words(message: str) -> tuple[int, list[str]]:
    """Return the number of plain words of a message, and those that no two words in a row of the source explain."""
    words = message.split()
    is_known = [False] * len(words)
    for start in range(len(words)):
        for end in range(start + 2, len(words) + 1):
            if " ".join(words[start:end]) in source_strings():
                is_known[start:end] = [True] * (end - start)
    plain = [at for at, word in enumerate(words) if re.fullmatch(r"[A-Za-z_]{2,}[,:;.]?", word)]
    return len(plain), [words[at] for at in plain if not is_known[at]]


@each_guide_page
def test_messages_that_a_page_quotes_are_in_the_source(page: Page) -> None:
    """The values in a message are unknown words, so three of five words may be."""
    ours = "|".join(name for name, kind in vars(_errors).items() if isinstance(kind, type))
    for message in re.findall(rf"`(?:{ours}): ([^`]*)`", without_blocks(page.text)):
        for part in message.split("..."):
            num_words, unknown = find_unknown_words(part)
            assert num_words < 3 or len(unknown) <= 0.6 * num_words, (
                f"no message of the source: {part}: {unknown}"
            )


def test_every_script_is_run_by_a_page_and_is_short() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"train.py", "parallel.py"}
    shown = "\n".join(find_blocks("console"))
    assert scripts <= set(re.findall(r"^\$ .*examples/(\w+\.py)", shown, flags=re.MULTILINE))
    for name in scripts:
        assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) <= 75


@pytest.mark.ci
def test_a_job_that_goes_on_in_other_layouts_has_the_losses_of_one_that_stays() -> None:
    for shown in find_blocks("console", containing="examples/checkpoints.py"):
        moved = re.findall(r"step (\d+) in .* loss (\S+)", shown)
        assert len(moved) == 12
    with tempfile.TemporaryDirectory() as folder:
        stayed = "".join(printed(f"python examples/checkpoints.py 1 {folder}") for _ in range(3))
    assert re.findall(r"step (\d+) in .* loss (\S+)", stayed) == moved


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
    out = capsys.readouterr().out
    for block in find_blocks("text", "output: migrate"):
        command, _, shown = block.partition("\n")
        assert command == "$ python -m namedmesh migrate train.py"
        assert out.startswith(shown)


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
    (expected,) = run_ranks(1, _without_fabric, init=False)
    for block in find_blocks("console", containing="fabric.py"):
        assert re.findall(r"^loss (\S+)$", block, flags=re.MULTILINE) == expected


def test_commands_that_are_not_shown_with_their_output_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in find_blocks("bash", containing="examples/train.py"):
        for line in block.splitlines():
            if "examples/train.py" in line:
                words = line.split()
                options = words[words.index("examples/train.py") + 1 :]
                assert Layout(dp=-1, tp=train.parse(options).tp, world_size=16)["dp"] == 2
    assert find_blocks("bash", containing="--nnodes 2")
    layers = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    widths = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    config = {"model_type": "llama", **layers, **widths}
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    for block in find_blocks("bash", containing="namedmesh partitions"):
        for line in block.splitlines():
            if line.startswith("namedmesh partitions"):
                assert main(line.split()[1:]) == 0


# --- the form of the pages --------------------------------------------------------------------------------------


@each_guide_page
def test_a_page_has_the_sections_of_the_template_in_order(page: Page) -> None:
    sections = re.findall(r"^## (.+)$", without_blocks(page.text), flags=re.MULTILINE)
    expected = ["See also"] if page.name in LISTS else list(SECTIONS)
    assert [title for title in sections if title in expected] == expected
    assert sections[-1] == "See also"
    opening = without_blocks(page.text).partition("\n## ")[0]
    assert re.match(r"# \S", opening)
    assert len(paragraphs(opening)) >= 1, "two or three sentences on when to use it"


@each_guide_page
def test_the_minimal_example_is_a_named_file_of_at_most_25_lines(page: Page) -> None:
    if page.name not in LISTS:
        section = page.text.partition("\n## Minimal example\n")[2].partition("\n## Run it\n")
        examples = all_blocks(section[0])
        assert examples
        assert len(examples[0].source.splitlines()) <= 25
        assert examples[0].language != "python" or examples[0].mark.startswith("file: ")


@each_guide_page
def test_headings_paragraphs_and_sentences_are_close_together(page: Page) -> None:
    problems = []
    for section in re.split(r"^#+ ", without_blocks(page.text), flags=re.MULTILINE):
        title = section.partition("\n")[0]
        prose = paragraphs("# " + section)
        words = sum(count_words(paragraph) for paragraph in prose)
        if words > 150:
            problems.append(f"{words} words under one heading: {title}")
        for paragraph in prose:
            if count_words(paragraph) > 60:
                problems.append(f"{count_words(paragraph)} words in a paragraph: {paragraph[:60]}")
            long = [sentence for sentence in sentences(paragraph) if count_words(sentence) > 30]
            problems += [f"{count_words(sentence)} words in a sentence: {sentence}" for sentence in long]
    assert problems == []


DOCUMENTS = [
    *PAGES,
    *(
        Page(ROOT / name, (ROOT / name).read_text(encoding="utf-8"))
        for name in ("README.md", "CONTRIBUTING.md")
    ),
]


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.path.relative_to(ROOT).as_posix()) for page in DOCUMENTS]
)
def test_measured_figures_stand_where_the_measurements_are_and_links_resolve(page: Page) -> None:
    prose = without_blocks(page.text)
    assert re.findall(r"\d+(?:\.\d+)? ?(?:%|times|ms|µs|GB|MB)\b", prose) == []
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if link.startswith("https://"):
            continue
        address, _, title = link.partition("#")
        target = (page.path.parent / address).resolve() if address else page.path
        assert target.exists(), link
        if title:
            linked = Page(target, target.read_text(encoding="utf-8"))
            assert title in {anchor(each) for each in linked.titles}, link


def test_the_index_is_four_tables_with_every_page_and_script() -> None:
    index = next(page for page in PAGES if page.name == "README")
    assert len(index.titles) == 1 + index.text.count("|---|") == 1 + 4
    assert len(index.text.splitlines()) <= 70
    names = [f"{page.name}.md" for page in GUIDE]
    names += [path.name for path in (ROOT / "examples").glob("*.py")]
    for name in names:
        assert f"]({name})" in index.text, f"examples/README.md has no link to {name}"
