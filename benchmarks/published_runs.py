"""Published training runs: the model, the layout, how it was trained, what was measured, and where it is published.

A field that a source does not state is an assumption, and named as one in ``assumed``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from namedmesh.plan import Hardware, Model, load_hardware

LLAMA_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LLAMA_70B = Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
LLAMA_405B = Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256)
DEEPSEEK_V3 = Model(
    layers=61,
    hidden=7168,
    heads=128,
    head_dim=128,
    rope_dim=64,
    value_dim=128,
    q_rank=1536,
    kv_rank=512,
    ffn=18432,
    vocab=129280,
    experts=256,
    top_k=8,
    expert_ffn=2048,
    shared_experts=1,
    dense_layers=3,
    expert_groups=4,
)
_H100 = load_hardware("h100")
# "each H100 GPU is equipped with 96GB HBM2e with 2.4 TB/sec peak memory bandwidth", "500W power limit", "the actual peak
# TFLOPs number is between SXM and NVL, and we don't know its exact value": NVL's 835 (NVIDIA's data sheet) is taken.
GRAND_TETON = replace(
    _H100,
    name="H100 SXM 96 GB, 500 W",
    memory=96 * 2**30,
    memory_bandwidth=2.4e12,
    peak={"bf16": 835e12, "fp8": 1671e12},
)
# 2,048 H800 in nodes of 8: NVLink of 160 GB/s, InfiniBand of 50 GB/s (DeepSeek-V3, section 3.2.2).
_LEFT = 112 / 132  # "only 20 SMs are sufficient to fully utilize the bandwidths", of 132 (the same section)
H800 = replace(
    _H100,
    name="H800",
    domain_bandwidth=160e9,
    domain_fraction=1.0,
    matmul={precision: fraction * _LEFT for precision, fraction in _H100.matmul.items()},
)
A100 = load_hardware("a100")


@dataclass(frozen=True)
class Run:
    """One published run.

    Args:
        name: the model, and what sets the row apart.
        source: the paper or page, with its table.
        model: the model.
        hardware: what it ran on.
        sizes: the size of each axis.
        job: the other fields of :class:`namedmesh.plan.Job`.
        memory: GiB of the fullest rank, as published.
        activations: bytes of the first pipeline rank's activations, by a published formula.
        tokens: tokens a second and GPU, as published.
        assumed: what the source does not state; and, for a miss, which assumption differs.
        afterwards: whether the run was tried when the model was done.
    """

    name: str
    source: str
    model: Model
    hardware: Hardware
    sizes: dict[str, int]
    job: dict[str, Any] = field(default_factory=dict)
    memory: float | None = None
    activations: float | None = None
    tokens: float | None = None
    assumed: str = ""
    afterwards: bool = False


def _gpt(layers: int, hidden: int, heads: int) -> Model:
    return Model(layers=layers, hidden=hidden, heads=heads, vocab=51200, tied=True)


def _gpt_operations(model: Model, seq: int = 2048, *, again: bool) -> float:
    """Return the operations for a token as Narayanan et al. and Korthikanti et al. count them, with recomputation or not."""
    layers, hidden, vocab = model.layers or 0, model.hidden or 0, model.vocab or 0
    passes = 96 if again else 72
    return passes * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6 * hidden * vocab


_SC21_JOB = {
    "seq": 2048,
    "trainer": "megatron",
    "checkpointing": "full",
    "sequence_parallel": False,
    "fused_attention": False,
    "dropout": True,
    "overlap": False,
    "stage": 0,
}


def _megatron_2021() -> list[Run]:
    # billions, heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s a GPU
    table = (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )
    runs = []
    for billions, heads, hidden, layers, tp, pp, gpus, batch, teraflops in table:
        model = _gpt(layers, hidden, heads)
        sizes = {"tp": tp, "pp": pp, "dp": gpus // tp // pp}
        job = _SC21_JOB | {
            "global_batch": batch,
            "stages_per_rank": 2 if pp > 1 and layers % (2 * pp) == 0 else 1,
        }
        runs.append(
            Run(
                f"GPT {billions}B",
                "Narayanan et al., SC 2021, table 1",
                model,
                A100,
                sizes,
                job,
                tokens=teraflops * 1e12 / _gpt_operations(model, again=True),
                assumed="micro-batch 1; interleaved with 2 stages a rank where they divide the layers; the paper takes tp inside a node "
                "first, by rule",
            )
        )
    return runs


def _korthikanti() -> list[Run]:
    # name, heads, hidden, layers, tp, pp, GPUs, batch, micro-batch, stages a rank, seconds: full, selective with SP
    table = (
        ("22B", 64, 6144, 48, 8, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 8, 64, 1, 3, 18.13, 13.75),
        ("530B", 128, 20480, 105, 8, 35, 280, 1, 3, 49.05, 37.83),
        ("1T", 160, 25600, 128, 8, 64, 512, 1, 1, 94.42, 71.49),
    )
    runs = []
    for name, heads, hidden, layers, tp, pp, batch, micro_batch, turns, *seconds in table:
        model = _gpt(layers, hidden, heads)
        tokens = batch * 2048 / (tp * pp)
        common = _SC21_JOB | {"global_batch": batch, "micro_batch": micro_batch, "stages_per_rank": turns}
        stage = 2048 * micro_batch * hidden * layers * (1 + (pp - 1) / (pp * turns) if turns > 1 else 1)
        attention, widths = 5 * heads * 2048 / hidden, 34.0
        policies = {
            "none": (False, 10 + 24 / tp + attention / tp, None),
            "selective": (False, 10 + 24 / tp, None),
            "none, sequence-parallel": (True, (widths + attention) / tp, None),
            "selective, sequence-parallel": (True, widths / tp, seconds[1]),
            "full": (False, 2.0, seconds[0]),
        }
        for policy, (parallel, each, took) in policies.items():
            job = common | {"checkpointing": policy.partition(",")[0], "sequence_parallel": parallel}
            runs.append(
                Run(
                    f"GPT {name}, {policy}",
                    "Korthikanti et al., MLSys 2023, tables 2, 3 and 5, section 4.2.3",
                    model,
                    A100,
                    {"tp": tp, "pp": pp, "dp": 1},
                    job,
                    activations=stage * each,
                    tokens=tokens / took if took else None,
                    assumed="activations by the paper's formula, not measured"
                    + (
                        ""
                        if pp * turns <= layers and layers % (pp * turns) == 0
                        else "; the layers do not divide by the stages"
                    ),
                )
            )
    return runs


def _llama_operations(seq: int) -> float:
    """Return the operations for a token of Llama 3 405B by the definition that the paper names, of PaLM's appendix B.

    That counts attention without the half that a causal mask leaves out.
    """
    model = LLAMA_405B
    return 6 * model.total + 12 * (model.layers or 0) * (model.hidden or 0) * seq


def _llama_3() -> list[Run]:
    table = ((8192, 1, 64, 8192, 32, 430), (16384, 1, 128, 8192, 16, 400), (16384, 16, 8, 131072, 16, 380))
    policy = {"stage": 2, "stages_per_rank": 2, "checkpointing": "none", "trainer": "megatron"}
    return [
        Run(
            f"Llama 3 405B, {gpus} GPUs, {seq} tokens",
            "Llama Team, The Llama 3 Herd of Models, 2024, table 4",
            LLAMA_405B,
            _H100,
            {"tp": 8, "cp": cp, "pp": 16, "dp": dp},
            policy | {"seq": seq, "global_batch": dp * batch},
            tokens=teraflops * 1e12 / _llama_operations(seq),
            assumed="micro-batch 1; interleaved with 2 stages a rank, where the paper has a schedule of its own that keeps fewer "
            "micro-batches; the planner would take some context instead of pipeline parallelism: its bubble is 31 % at 16 micro-batches",
        )
        for gpus, cp, dp, seq, batch, teraflops in table
    ]


def _deepseek() -> list[Run]:
    return [
        Run(
            "DeepSeek-V3",
            "DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, sections 3 and 4.2, table 1",
            DEEPSEEK_V3,
            H800,
            {"pp": 16, "dp": 128, "ep": 64},
            {
                "seq": 4096,
                "global_batch": 15360,
                "stage": 1,
                "precision": "fp8",
                "schedule": "dualpipe",
                "trainer": "megatron",
                "checkpointing": "selective",
            },
            tokens=1e12 / (180e3 * 3600),
            assumed="micro-batch 1; not counted: inputs kept in fp8, norms and up-projections computed again, the second token's "
            "prediction, scales of fp8 for each tile",
        )
    ]


_PAGE = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table "
_MICRO = (
    "micro-batches: torchtitan's default, as many as stages (pipelining_utils.py); asynchronous TP not counted; the page "
    "shows each axis, not the fastest layout: the planner would take context instead of tensor and pipeline parallelism"
)


def _torchtitan_8b() -> list[Run]:
    rows = (  # words, precision; GPUs, table, tokens, GiB
        ("eager", "bf16", ((8, 1, 5762, 82.4), (128, 3, 5605, 67.0))),
        ("compile", "bf16", ((8, 1, 6667, 77.0), (128, 3, 6514, 62.0))),
        ("compile, float8", "fp8", ((8, 1, 8532, 76.8), (128, 3, 8380, 61.8))),
    )
    runs = []
    for words, precision, measured in rows:
        for gpus, table, tokens, memory in measured:
            job = {
                "seq": 8192,
                "global_batch": 2 * gpus,
                "micro_batch": 2,
                "checkpointing": "op",
                "precision": precision,
                "compiled": words != "eager",
                "fused_norms": words != "eager",
            }
            name = f"Llama 3.1 8B, FSDP {gpus}, {words}"
            runs.append(
                Run(
                    name,
                    f"{_PAGE}{table}",
                    LLAMA_8B,
                    GRAND_TETON,
                    {"dp": gpus},
                    job,
                    memory,
                    None,
                    tokens,
                )
            )
    for cp, tokens, memory in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        job = {"seq": 32768 * cp, "global_batch": 8 // cp, "checkpointing": "full", "precision": "fp8"}
        name, sizes = f"Llama 3.1 8B, FSDP {8 // cp}, CP {cp}", {"dp": 8 // cp, "cp": cp}
        ring = "attention in a ring is taken to be as fast as in one piece" if cp > 1 else ""
        runs.append(Run(name, f"{_PAGE}2", LLAMA_8B, GRAND_TETON, sizes, job, memory, None, tokens, ring))
    return runs


def _torchtitan_large() -> list[Run]:
    full = {"checkpointing": "full", "precision": "fp8"}
    rows: tuple[tuple[str, int, Model, dict[str, int], dict[str, Any], float, int], ...] = (
        (
            "70B, FSDP 32, TP 8",
            4,
            LLAMA_70B,
            {"dp": 32, "tp": 8},
            {"global_batch": 512, "micro_batch": 16},
            71.9,
            829,
        ),
        ("405B, 1F1B", 5, LLAMA_405B, {"dp": 8}, {"global_batch": 256, "micro_batch": 4}, 82.5, 100),
        (
            "405B, interleaved",
            5,
            LLAMA_405B,
            {"dp": 8},
            {"global_batch": 256, "micro_batch": 2, "stages_per_rank": 2},
            72.7,
            128,
        ),
        ("405B, CP 1", 6, LLAMA_405B, {"dp": 8}, {"global_batch": 64, "seq": 32768}, 75.3, 76),
        ("405B, CP 2", 6, LLAMA_405B, {"dp": 4, "cp": 2}, {"global_batch": 32, "seq": 65536}, 75.9, 47),
        ("405B, CP 4", 6, LLAMA_405B, {"dp": 2, "cp": 4}, {"global_batch": 16, "seq": 131072}, 77.1, 31),
        ("405B, CP 8", 6, LLAMA_405B, {"dp": 1, "cp": 8}, {"global_batch": 8, "seq": 262144}, 84.9, 16),
    )
    return [
        Run(
            f"Llama 3.1 {name}",
            f"{_PAGE}{table}",
            model,
            GRAND_TETON,
            sizes if model is LLAMA_70B else {"tp": 8, "pp": 8, **sizes},
            {"seq": 8192, **full, **job},
            memory,
            None,
            tokens,
            _MICRO,
        )
        for name, table, model, sizes, job, memory, tokens in rows
    ]


def _tried_afterwards() -> list[Run]:
    """Return runs that the model was tried on when it was done: nothing was changed for them."""
    h200, op = load_hardware("h200"), {"seq": 8192, "checkpointing": "op"}
    page = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
    runs = []
    for gpus, tokens, memory in ((32, 10938, 47.96), (64, 10753, 46.97)):
        job = op | {"global_batch": 2 * gpus, "micro_batch": 2, "precision": "fp8", "fused_loss": True}
        runs.append(
            Run(
                f"Llama 3.1 8B, FSDP {gpus}, H200",
                page,
                LLAMA_8B,
                h200,
                {"dp": gpus},
                job,
                memory,
                None,
                tokens,
            )
        )
    llama_2_13b = Model(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000)
    llama_2_70b = replace(LLAMA_70B, vocab=32000)
    for name, model, seq, rows, policy, tokens in (
        ("Llama 3 8B", LLAMA_8B, 8192, 1, "op", 2973),
        ("Llama 3 70B", LLAMA_70B, 8192, 1, "full", 331),
        ("Llama 2 13B", llama_2_13b, 4096, 2, "none", 2162),
        ("Llama 2 13B", llama_2_13b, 4096, 2, "op", 1904),
        ("Llama 2 70B", llama_2_70b, 4096, 1, "op", 355),
        ("Llama 2 70B", llama_2_70b, 4096, 2, "full", 353),
    ):
        job = {"seq": seq, "global_batch": 64 * rows, "micro_batch": rows, "checkpointing": policy}
        job["compiled"] = False
        source = "torchtitan, docs/performance.md"
        runs.append(Run(f"{name}, FSDP 64, {policy}", source, model, A100, {"dp": 64}, job, tokens=tokens))
    page = "LLM Foundry, scripts/train/benchmarking/README.md"
    for name, layers, hidden, heads, gpus, batch, rows, policy, tokens in (
        ("MPT 7B", 32, 4096, 32, 8, 48, 6, "none", 10643),
        ("MPT 13B", 40, 5120, 40, 8, 16, 2, "none", 4792),
        ("MPT 30B", 48, 7168, 64, 32, 1344, 14, "full", 2308),
        ("MPT 70B", 80, 8192, 64, 64, 2048, 8, "full", 1039),
    ):
        model = Model(layers=layers, hidden=hidden, heads=heads, vocab=50432, tied=True)
        job = {"seq": 2048, "global_batch": batch, "micro_batch": rows, "checkpointing": policy}
        job |= {"compiled": False, "fused_loss": True}
        runs.append(Run(f"{name}, FSDP {gpus}, H100", page, model, _H100, {"dp": gpus}, job, tokens=tokens))
    gpt = Model(layers=96, hidden=12288, heads=96, vocab=64000, tied=True)
    nemotron = Model(layers=96, hidden=18432, heads=96, kv_heads=8, vocab=256000)
    megatron = {"trainer": "megatron", "checkpointing": "selective"}
    for name, source, model, hardware, pp, turns, seq, gpus, batch, seconds in (
        (
            "MegaScale 175B",
            "Jiang et al., MegaScale, NSDI 2024, table 2",
            gpt,
            A100,
            8,
            6,
            2048,
            256,
            768,
            32.0,
        ),
        (
            "MegaScale 175B",
            "Jiang et al., MegaScale, NSDI 2024, table 2",
            gpt,
            A100,
            8,
            6,
            2048,
            12288,
            6144,
            6.34,
        ),
        (
            "Nemotron-4 340B",
            "NVIDIA, Nemotron-4 340B, 2024, table 2",
            nemotron,
            _H100,
            12,
            8,
            4096,
            1536,
            768,
            10.3,
        ),
        (
            "Nemotron-4 340B",
            "NVIDIA, Nemotron-4 340B, 2024, table 2",
            nemotron,
            _H100,
            12,
            8,
            4096,
            6144,
            2304,
            8.0,
        ),
    ):
        job = megatron | {"seq": seq, "global_batch": batch, "stages_per_rank": turns, "stage": 1}
        sizes = {"tp": 8, "pp": pp, "dp": gpus // 8 // pp}
        runs.append(
            Run(
                f"{name}, {gpus} GPUs",
                source,
                model,
                hardware,
                sizes,
                job,
                tokens=batch * seq / seconds / gpus,
            )
        )
    runs += _tried_afterwards_in_2022()
    return [replace(run, afterwards=True) for run in runs]


def _tried_afterwards_in_2022() -> list[Run]:
    """Return runs of Megatron-DeepSpeed, with full recomputation and without sequence parallelism."""
    turing, bloom = _gpt(105, 20480, 128), Model(layers=70, hidden=14336, heads=112, vocab=250880, tied=True)
    runs = [
        Run(
            f"MT-NLG 530B, {gpus} GPUs",
            "Smith et al., Megatron-Turing NLG 530B, 2022, section 3.3",
            turing,
            A100,
            {"tp": 8, "pp": 35, "dp": gpus // 280},
            _SC21_JOB | {"global_batch": 1920},
            tokens=1920 * 2048 / seconds / gpus,
            assumed="micro-batch 1; ranked without an interleaved schedule, as it ran",
        )
        for gpus, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
    ]
    job = _SC21_JOB | {"global_batch": 2048, "micro_batch": 2, "stage": 1, "dropout": False, "overlap": True}
    source = "BigScience, BLOOM, 2022; 150 TFLOP/s at its start by the training chronicles of ml-engineering"
    tokens = 150e12 / _gpt_operations(bloom, again=True)
    jean_zay = replace(A100, nics_per_node=4, nic_bandwidth=12.5e9)  # four Omni-Path links of 100 Gb/s
    runs.append(Run("BLOOM 176B", source, bloom, jean_zay, {"tp": 4, "pp": 12, "dp": 8}, job, tokens=tokens))
    return runs


RUNS = (
    *_megatron_2021(),
    *_korthikanti(),
    *_llama_3(),
    *_deepseek(),
    *_torchtitan_8b(),
    *_torchtitan_large(),
    *_tried_afterwards(),
)
"""Every run, in the order of the tables."""
