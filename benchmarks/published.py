"""What the planner predicts for published runs, the rows of published.csv: memory, tokens a second, the place of the layout.

    python benchmarks/published.py

The place is that of the published layout by tokens a second among all that fit the hardware with the same policies and
the same global batch; in brackets where the planner takes it not to fit, among all that need no more memory.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from namedmesh.tools import plan
from namedmesh.tools.plan.memory import estimate_memory
from namedmesh.tools.plan.model import Axes
from namedmesh.tools.plan.partitions import find_partition
from namedmesh.tools.plan.step import estimate_step

MEMORY_GOAL, SPEED_GOAL, PLACE_GOAL = 0.15, 0.25, 5

_DEEPSEEK_V3: dict[str, Any] = {"experts": 256, "top_k": 8, "expert_ffn": 2048, "shared_experts": 1}
_DEEPSEEK_V3 |= {"dense_layers": 3, "expert_groups": 4, "head_dim": 128, "rope_dim": 64, "value_dim": 128}
_DEEPSEEK_V3 |= {"q_rank": 1536, "kv_rank": 512}
_QWEN_3: dict[str, Any] = {"kv_heads": 4, "head_dim": 128, "vocab": 151936, "experts": 128, "top_k": 8}
MODELS = {
    "llama-8b": plan.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "llama-70b": plan.Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    "llama-405b": plan.Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256),
    "llama2-7b": plan.Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
    "llama2-13b": plan.Model(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000),
    "llama2-70b": plan.Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000),
    "deepseek-v3": plan.Model(layers=61, hidden=7168, heads=128, ffn=18432, vocab=129280, **_DEEPSEEK_V3),
    "qwen3-30b": plan.Model(layers=48, hidden=2048, heads=32, ffn=6144, expert_ffn=768, **_QWEN_3),
    "qwen3-235b": plan.Model(layers=94, hidden=4096, heads=64, ffn=12288, expert_ffn=1536, **_QWEN_3),
    "nemotron-340b": plan.Model(layers=96, hidden=18432, heads=96, kv_heads=8, vocab=256000),
    "nemotron": plan.Model(vocab=256000),  # of these the rows have the sizes
    "gpt": plan.Model(vocab=51200, tied=True),
    "megascale": plan.Model(vocab=64000, tied=True),
    "bloom": plan.Model(vocab=250880, tied=True),
    "mpt": plan.Model(vocab=50432, tied=True),
}
_H100, _A100 = plan.load_hardware("h100"), plan.load_hardware("a100")
# Before FlashAttention the scores were written to memory: for each of a head's 128 features and each earlier token 4 operations at
# the rate of products, and for each score 10 bytes at that of memory, are 0.11 of the peak of the half that a causal mask leaves.
_UNFUSED = replace(_A100, name="A100, attention's scores in memory", attention=0.11)
HARDWARE = {
    **{name: plan.load_hardware(name) for name in ("a100", "b200", "gb200-nvl72", "h100", "h200")},
    "a100-unfused": _UNFUSED,
    # FlashAttention in Triton, attn_impl's default in LLM Foundry's submit_benchmarks.py; FlashAttention-2 is about twice as
    # fast (Dao, 2023, abstract).
    "a100-triton": replace(_A100, attention=_A100.attention / 2),
    "h100-triton": replace(_H100, attention=_H100.attention / 2),
    # torchtitan's: "each H100 GPU is equipped with 96GB HBM2e with 2.4 TB/sec peak memory bandwidth", "500W power limit", "the
    # actual peak TFLOPs number is between SXM and NVL, and we don't know its exact value": NVL's 835 (NVIDIA's data sheet) is taken.
    "grand-teton": replace(
        _H100, memory=96 * 2**30, memory_bandwidth=2.4e12, peak={"bf16": 835e12, "fp8": 1671e12}
    ),
    # NVLink of 160 GB/s; "only 20 SMs are sufficient to fully utilize the bandwidths", of 132 (DeepSeek-V3, section 3.2.2).
    "h800": replace(
        _H100,
        domain_bandwidth=160e9,
        domain_fraction=1.0,
        matmul={precision: rate * 112 / 132 for precision, rate in _H100.matmul.items()},
    ),
    "jean-zay": replace(_UNFUSED, nics_per_node=4, nic_bandwidth=12.5e9),  # four Omni-Path links of 100 Gb/s
}


class Run(NamedTuple):
    """A row of published.csv: memory in GiB of the fullest rank, tokens a second and GPU; what its source does not state."""

    name: str
    group: str
    source: str
    assumed: str
    job: plan.Job
    axes: Axes
    gpus: int
    memory: float | None
    tokens: float


class Result(NamedTuple):
    """A run's predictions: errors are of the published figure, None where none is published."""

    memory: float | None
    tokens: float
    place: str


def read_runs() -> list[Run]:
    """Return the rows of published.csv, which says what a run knew ("##"), its source ("#") and what that does not state."""
    lines = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines()
    names, runs = [name.strip() for name in lines[0].split(",")], []
    group = source = assumed = ""
    for line in lines[1:]:
        if line.startswith("## "):
            group = line[3:]
        elif line.startswith("#   "):
            assumed = f"{assumed} {line[4:]}".strip()
        elif line.startswith("# "):
            source, assumed = line[2:], ""
        else:
            cells = (cell.strip() for cell in line.split(","))
            runs.append(_run(dict(zip(names, cells, strict=True)), group, source, assumed))
    return runs


def _run(row: dict[str, str], group: str, source: str, assumed: str) -> Run:
    flags = {"yes": True, "no": False}
    values: dict[str, Any] = {name: flags.get(cell, cell) for name, cell in row.items()}
    values |= {name: int(cell) for name, cell in row.items() if cell.isdecimal()}
    model, gpus = MODELS[row["model"]], values["gpus"]
    if row["layers"]:
        model = replace(model, layers=values["layers"], hidden=values["hidden"], heads=values["heads"])
    tp, cp, pp = values["tp"], values["cp"], values["pp"]
    axes = Axes(tp, cp, pp, gpus // (tp * cp * pp), ep=values["ep"])
    knobs = {one.name: values[one.name] for one in fields(plan.Job) if one.name in values}
    job = plan.Job(**knobs | {"model": model, "hardware": HARDWARE[row["hardware"]]})
    memory = float(row["GiB"]) if row["GiB"] else None
    tokens = _tokens(float(row["figure"]), row["unit"], job, gpus)
    return Run(row["name"], group, source, assumed, job, axes, gpus, memory, tokens)


def _tokens(figure: float, unit: str, job: plan.Job, gpus: int) -> float:
    """Return the tokens a second and GPU that a published figure means."""
    model, seq = job.model, job.seq
    layers, hidden, vocab = model.layers, model.hidden, model.vocab
    if unit == "TFLOP/s":  # operations as Narayanan et al. count them, with recomputation
        return figure * 1e12 / (96 * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6 * hidden * vocab)
    if unit == "TFLOP/s PaLM":  # by its appendix B: attention without the half that a causal mask leaves out
        return figure * 1e12 / (6 * model.total + 12 * layers * hidden * seq)
    if unit == "s":  # of a step
        return job.global_batch * seq / figure / gpus
    if unit == "GPU h":  # of 10^12 tokens
        return 1e12 / (figure * 3600)
    return figure


def place(run: Run) -> str:
    """Return the place of the published layout among all that fit, or that need no more memory than it."""
    needed, has = estimate_memory(run.job, run.axes).total, run.job.hardware.memory
    job = replace(run.job, hardware=replace(run.job.hardware, memory=max(needed, has)))
    partitions = plan.list_partitions(run.gpus, job, margin=0, dp_replicate=1)
    published = find_partition(partitions, run.axes._asdict())
    if published.memory is None:
        return "none"
    fitting = plan.best_partitions(partitions, len(partitions))
    where = f"{fitting.index(published) + 1}/{len(fitting)}"
    return where if needed <= has else f"({where})"


def compare(run: Run) -> Result:
    """Compare one run with what is predicted for it."""
    memory = None
    if run.memory is not None:
        memory = estimate_memory(run.job, run.axes).total / 2**30 / run.memory - 1
    seconds = sum(estimate_step(run.job, run.axes).values())
    predicted = run.job.global_batch * run.job.seq / seconds / run.gpus
    return Result(memory, predicted / run.tokens - 1, place(run))


def within_the_best(result: Result) -> bool:
    """Return whether the published layout is among the best that fit."""
    place = result.place.partition("/")[0]
    return place.isdigit() and int(place) <= PLACE_GOAL


def _cell(published: float | None, error: float | None) -> str:
    if published is None or error is None:
        return ""
    digits = 0 if published >= 1000 else 1  # noqa: PLR2004  four digits say enough
    return f"{published * (1 + error):,.{digits}f} for {published:,.{digits}f}: {error:+.0%}"


def main() -> None:
    """Print the table, and how many rows are within the goals."""
    rows = [(run, compare(run)) for run in read_runs()]
    print("| predicted for published: error | GiB | tokens/s a GPU | place |\n|---|---|---|---|")
    source = ""
    for run, result in rows:
        if run.source != source:
            source = run.source
            print(f"| **{source}** | | | |")
        cells = (_cell(run.memory, result.memory), _cell(run.tokens, result.tokens), result.place)
        print(f"| {run.name} | {' | '.join(cells)} |")
    for group in dict.fromkeys(run.group for run, _ in rows):
        chosen = [result for run, result in rows if run.group == group]
        print(f"\n{group}")
        _summary("memory", [one.memory for one in chosen if one.memory is not None], MEMORY_GOAL)
        _summary("tokens a second", [one.tokens for one in chosen], SPEED_GOAL)
        best = sum(within_the_best(one) for one in chosen)
        print(f"  published layout among the best {PLACE_GOAL} that fit: {best} of {len(chosen)}")


def _summary(what: str, errors: list[float], goal: float) -> None:
    if errors:
        within = sum(abs(error) <= goal for error in errors)
        print(
            f"  {what}: {within} of {len(errors)} within {goal:.0%}, from {min(errors):+.0%} to {max(errors):+.0%}, "
            f"median of the size {median(map(abs, errors)):.0%}"
        )


if __name__ == "__main__":
    main()
