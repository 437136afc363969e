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
_LLAMA_2 = {
    "7B": Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
    "13B": Model(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000),
    "70B": replace(LLAMA_70B, vocab=32000),
}
_NEMOTRON_340B = Model(layers=96, hidden=18432, heads=96, kv_heads=8, vocab=256000)
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
# Before FlashAttention the scores were written to memory: for each of a head's 128 features and each earlier token 4 operations at
# the rate of products, and for each score 10 bytes at that of memory, are 0.11 of the peak of the half that a causal mask leaves.
A100_UNFUSED = replace(A100, name="A100, attention's scores in memory", attention=0.11)


GROUPS = ("runs the model was made with", "runs looked up later", "runs nothing was decided with")
"""What was known of a run when it was decided which effects are counted."""


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
        tokens: tokens a second and GPU, as published.
        assumed: what the source does not state; and, for a miss, which assumption differs.
        group: one of :data:`GROUPS`.
    """

    name: str
    source: str
    model: Model
    hardware: Hardware
    sizes: dict[str, int]
    job: dict[str, Any] = field(default_factory=dict)
    memory: float | None = None
    tokens: float | None = None
    assumed: str = ""
    group: str = GROUPS[0]


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
    "micro_batch": 1,
    "sequence_parallel": False,
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
                A100_UNFUSED,
                sizes,
                job,
                tokens=teraflops * 1e12 / _gpt_operations(model, again=True),
                assumed="micro-batch 1; interleaved with 2 stages a rank where they divide the layers; the paper takes tp inside a node "
                "first, by rule",
            )
        )
    return runs


def _korthikanti() -> list[Run]:
    # name, heads, hidden, layers, tp, pp, batch, micro-batch, stages a rank, seconds: full, selective with sequence parallelism
    table = (
        ("22B", 64, 6144, 48, 8, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 8, 64, 1, 3, 18.13, 13.75),
        ("530B", 128, 20480, 105, 8, 35, 280, 1, 3, 49.05, 37.83),
        ("1T", 160, 25600, 128, 8, 64, 512, 1, 1, 94.42, 71.49),
    )
    runs = []
    for name, heads, hidden, layers, tp, pp, batch, micro_batch, turns, *seconds in table:
        common = _SC21_JOB | {"global_batch": batch, "micro_batch": micro_batch, "stages_per_rank": turns}
        for policy, parallel, took in zip(("full", "selective"), (False, True), seconds, strict=True):
            job = common | {"checkpointing": policy, "sequence_parallel": parallel}
            runs.append(
                Run(
                    f"GPT {name}, {policy}",
                    "Korthikanti et al., MLSys 2023, tables 3 and 5",
                    _gpt(layers, hidden, heads),
                    A100_UNFUSED,
                    {"tp": tp, "pp": pp, "dp": 1},
                    job,
                    tokens=batch * 2048 / (tp * pp) / took,
                    assumed="the paper takes tp inside a node first, by rule",
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
    policy = {
        "stage": 2,
        "stages_per_rank": 2,
        "checkpointing": "none",
        "trainer": "megatron",
        "micro_batch": 1,
    }
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
                "micro_batch": 1,
                "precision": "fp8",
                "stages_per_rank": 2,
                "trainer": "megatron",
                "checkpointing": "selective",
            },
            tokens=1e12 / (180e3 * 3600),
            assumed="micro-batch 1; interleaved with 2 stages a rank, where DualPipe hides the experts' traffic too; not counted: what "
            "it computes again and keeps in fp8, so that the planner takes it not to fit; the second token's prediction",
        )
    ]


_PAGE = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table "
_MICRO = (
    "micro-batches: torchtitan's default, as many as stages (pipelining_utils.py); asynchronous TP not counted; the page "
    "shows each axis, not the fastest layout: the planner would take context instead of tensor and pipeline parallelism"
)


_RING = (
    "attention of each chunk is taken to be as fast as that of one sequence, which holds for 405B and for CP 2; the published steps "
    "of 8B over CP 4 and 8, in one node, take 1.4 times as long as predicted, and no source says why"
)


def _torchtitan_8b() -> list[Run]:
    rows = (  # words, precision; GPUs, table, tokens, GiB
        ("eager", "bf16", ((8, 1, 5762, 82.4), (128, 3, 5605, 67.0))),
        ("compile", "bf16", ((8, 1, 6667, 77.0), (128, 3, 6514, 62.0))),
        ("compile, float8", "fp8", ((8, 1, 8532, 76.8), (128, 3, 8380, 61.8))),
    )
    runs = []
    for words, precision, measured in rows:
        job = {"seq": 8192, "micro_batch": 2, "checkpointing": "selective", "precision": precision}
        for gpus, table, tokens, memory in measured:
            name, batch = f"Llama 3.1 8B, FSDP {gpus}, {words}", {"global_batch": 2 * gpus}
            source = f"{_PAGE}{table}"
            assumed = "counted as compiled: eager kernels read and write more" if words == "eager" else ""
            runs.append(
                Run(name, source, LLAMA_8B, GRAND_TETON, {"dp": gpus}, job | batch, memory, tokens, assumed)
            )
    for cp, tokens, memory in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        job = {"seq": 32768 * cp, "global_batch": 8 // cp, "checkpointing": "full", "precision": "fp8"}
        name, sizes = f"Llama 3.1 8B, FSDP {8 // cp}, CP {cp}", {"dp": 8 // cp, "cp": cp}
        ring = _RING if cp > 1 else ""
        runs.append(Run(name, f"{_PAGE}2", LLAMA_8B, GRAND_TETON, sizes, job, memory, tokens, ring))
    return runs


def _torchtitan_large() -> list[Run]:
    rows: tuple[tuple[str, int, dict[str, int], dict[str, Any], float, int], ...] = (
        ("70B, FSDP 32, TP 8", 4, {"dp": 32}, {"global_batch": 512, "micro_batch": 16}, 71.9, 829),
        ("405B, 1F1B", 5, {"dp": 8}, {"global_batch": 256, "micro_batch": 4}, 82.5, 100),
        (
            "405B, interleaved",
            5,
            {"dp": 8},
            {"global_batch": 256, "micro_batch": 2, "stages_per_rank": 2},
            72.7,
            128,
        ),
        ("405B, CP 1", 6, {"dp": 8}, {"global_batch": 64, "seq": 32768}, 75.3, 76),
        ("405B, CP 2", 6, {"dp": 4, "cp": 2}, {"global_batch": 32, "seq": 65536}, 75.9, 47),
        ("405B, CP 4", 6, {"dp": 2, "cp": 4}, {"global_batch": 16, "seq": 131072}, 77.1, 31),
        ("405B, CP 8", 6, {"dp": 1, "cp": 8}, {"global_batch": 8, "seq": 262144}, 84.9, 16),
    )
    runs = []
    for name, table, sizes, job, memory, tokens in rows:
        model, pipeline = (LLAMA_70B, {}) if name.startswith("70B") else (LLAMA_405B, {"pp": 8})
        policy = {"seq": 8192, "checkpointing": "full", "precision": "fp8"}
        runs.append(
            Run(
                f"Llama 3.1 {name}",
                f"{_PAGE}{table}",
                model,
                GRAND_TETON,
                {"tp": 8, **pipeline, **sizes},
                policy | job,
                memory,
                tokens,
                _MICRO,
            )
        )
    return runs


_A100_PAGE = (
    "compile = false in its configuration, train_configs/llama3_8b.toml; norms are taken to be one kernel, its fused_rmsnorm, "
    "as Llama 2 13B would not fit otherwise"
)
_MPT_PAGE = (
    "torch 2.0.1 with CUDA 11.8 (its sweep.sh): products are taken to be as fast as those of 2024 and 2025 that the constant is "
    "from, and FSDP's gathers to hide as FSDP2's do"
)
# FlashAttention in Triton, attn_impl's default in its submit_benchmarks.py; FlashAttention-2 is about twice as fast (Dao,
# 2023, abstract).
H100_TRITON = replace(_H100, name="H100, FlashAttention in Triton", attention=_H100.attention / 2)
A100_TRITON = replace(A100, name="A100, FlashAttention in Triton", attention=A100.attention / 2)


_MPT = (  # model, tokens of a sequence, GPUs, batch, micro-batch, checkpointing, tokens a second and GPU
    ("7B", 2048, 8, 48, 6, "none", 10643),
    ("13B", 2048, 8, 16, 2, "none", 4792),
    ("30B", 2048, 32, 1344, 14, "full", 2308),
    ("70B", 2048, 64, 2048, 8, "full", 1039),
)
_MORE_MPT = (
    ("1B", 2048, 8, 112, 14, "none", 45455),
    ("3B", 2048, 64, 1152, 6, "none", 22525),
    ("3B", 8192, 8, 144, 3, "none", 16578),
    ("7B", 1024, 8, 1024, 64, "full", 10203),
    ("7B", 4096, 8, 256, 16, "full", 8611),
    ("7B", 8192, 8, 128, 8, "full", 6935),
    ("7B", 32768, 8, 32, 2, "full", 3318),
    ("13B", 1024, 8, 960, 40, "full", 5502),
    ("13B", 2048, 64, 128, 2, "none", 4800),
    ("13B", 4096, 8, 240, 10, "full", 4717),
    ("13B", 16384, 8, 72, 3, "full", 2985),
    ("30B", 2048, 8, 504, 3, "full", 2002),
    ("30B", 2048, 16, 480, 10, "full", 2263),
    ("30B", 4096, 8, 168, 1, "full", 1802),
    ("70B", 2048, 32, 1024, 2, "full", 882),
)
_MPT_A100 = (
    ("1B", 1024, 8, 576, 18, "none", 22112),
    ("1B", 2048, 8, 448, 14, "none", 20513),
    ("1B", 8192, 8, 96, 3, "none", 13814),
    ("1B", 32768, 8, 32, 1, "none", 6275),
    ("3B", 1024, 8, 960, 20, "none", 11580),
    ("3B", 2048, 8, 160, 10, "none", 10811),
    ("3B", 8192, 8, 144, 3, "none", 7695),
    ("3B", 32768, 8, 144, 3, "full", 3029),
    ("7B", 1024, 8, 1024, 64, "full", 4357),
    ("7B", 2048, 8, 96, 6, "none", 4641),
    ("7B", 4096, 8, 256, 16, "full", 3684),
    ("7B", 8192, 8, 128, 8, "full", 3206),
    ("7B", 32768, 8, 32, 2, "full", 1672),
    ("13B", 1024, 8, 960, 40, "full", 2330),
    ("13B", 2048, 8, 48, 2, "none", 2262),
    ("13B", 4096, 8, 240, 10, "full", 2060),
    ("13B", 16384, 8, 72, 3, "full", 1431),
    ("30B", 1024, 8, 1008, 6, "full", 946),
    ("30B", 2048, 8, 504, 3, "full", 916),
    ("30B", 4096, 8, 168, 1, "full", 814),
    ("30B", 8192, 8, 168, 1, "full", 574),
    ("70B", 2048, 32, 1024, 2, "full", 373),
    ("70B", 2048, 64, 2048, 8, "full", 410),
)


def _llm_foundry(hardware: Hardware, rows: tuple[tuple[str, int, int, int, int, str, int], ...]) -> list[Run]:
    sizes = {"1B": (24, 2048, 16), "3B": (32, 2560, 32), "7B": (32, 4096, 32), "13B": (40, 5120, 40)}
    sizes |= {"30B": (48, 7168, 64), "70B": (80, 8192, 64)}
    page = f"LLM Foundry, scripts/train/benchmarking/README.md, on {hardware.name}"
    runs = []
    for size, seq, gpus, batch, micro_batch, policy, tokens in rows:
        layers, hidden, heads = sizes[size]
        model = Model(layers=layers, hidden=hidden, heads=heads, vocab=50432, tied=True)
        job = {"seq": seq, "global_batch": batch, "micro_batch": micro_batch, "checkpointing": policy}
        job |= {"fused_loss": True}  # its default loss_fn is fused_crossentropy
        name = f"MPT {size}, FSDP {gpus}, {seq} tokens"
        runs.append(Run(name, page, model, hardware, {"dp": gpus}, job, tokens=tokens, assumed=_MPT_PAGE))
    return runs


def _tried_afterwards() -> list[Run]:
    """Return runs that were looked up when the model was made; eager kernels and casts to fp8 are counted since."""
    h200, op = load_hardware("h200"), {"seq": 8192, "checkpointing": "selective"}
    page = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
    runs = []
    for gpus, tokens, memory in ((32, 10938, 47.96), (64, 10753, 46.97)):
        job = op | {"global_batch": 2 * gpus, "micro_batch": 2, "precision": "fp8", "fused_loss": True}
        name = f"Llama 3.1 8B, FSDP {gpus}, H200"
        runs.append(Run(name, page, LLAMA_8B, h200, {"dp": gpus}, job, memory, tokens))
    for name, model, seq, rows, policy, tokens in (
        ("Llama 3 8B", LLAMA_8B, 8192, 1, "selective", 2973),
        ("Llama 3 70B", LLAMA_70B, 8192, 1, "full", 331),
        ("Llama 2 13B", _LLAMA_2["13B"], 4096, 2, "none", 2162),
        ("Llama 2 13B", _LLAMA_2["13B"], 4096, 2, "selective", 1904),
        ("Llama 2 70B", _LLAMA_2["70B"], 4096, 1, "selective", 355),
        ("Llama 2 70B", _LLAMA_2["70B"], 4096, 2, "full", 353),
    ):
        job = {"seq": seq, "global_batch": 64 * rows, "micro_batch": rows, "checkpointing": policy}
        title, source = f"{name}, FSDP 64, {policy}", "torchtitan, docs/performance.md"
        runs.append(Run(title, source, model, A100, {"dp": 64}, job, tokens=tokens, assumed=_A100_PAGE))
    gpt = Model(layers=96, hidden=12288, heads=96, vocab=64000, tied=True)
    megascale, report = (
        "Jiang et al., MegaScale, NSDI 2024, table 2",
        "NVIDIA, Nemotron-4 340B, 2024, table 2",
    )
    for name, source, model, hardware, pp, turns, seq, gpus, batch, seconds in (
        ("MegaScale 175B", megascale, gpt, A100, 8, 6, 2048, 256, 768, 32.0),
        ("MegaScale 175B", megascale, gpt, A100, 8, 6, 2048, 12288, 6144, 6.34),
        ("Nemotron-4 340B", report, _NEMOTRON_340B, _H100, 12, 8, 4096, 1536, 768, 10.3),
        ("Nemotron-4 340B", report, _NEMOTRON_340B, _H100, 12, 8, 4096, 6144, 2304, 8.0),
    ):
        job = {"trainer": "megatron", "checkpointing": "selective", "stages_per_rank": turns, "stage": 1}
        job |= {"seq": seq, "global_batch": batch}
        sizes, speed = {"tp": 8, "pp": pp, "dp": gpus // 8 // pp}, batch * seq / seconds / gpus
        runs.append(Run(f"{name}, {gpus} GPUs", source, model, hardware, sizes, job, tokens=speed))
    runs += _llm_foundry(H100_TRITON, _MPT)
    runs += _tried_afterwards_in_2022()
    return [replace(run, group=GROUPS[1]) for run in runs]


def _tried_afterwards_in_2022() -> list[Run]:
    """Return runs of Megatron-DeepSpeed, with full recomputation and without sequence parallelism."""
    turing, bloom = _gpt(105, 20480, 128), Model(layers=70, hidden=14336, heads=112, vocab=250880, tied=True)
    runs = [
        Run(
            f"MT-NLG 530B, {gpus} GPUs",
            "Smith et al., Megatron-Turing NLG 530B, 2022, section 3.3",
            turing,
            A100_UNFUSED,
            {"tp": 8, "pp": 35, "dp": gpus // 280},
            _SC21_JOB | {"global_batch": 1920},
            tokens=1920 * 2048 / seconds / gpus,
            assumed="micro-batch 1; ranked without an interleaved schedule, as it ran; DeepSpeed's pipeline is taken to be as fast as "
            "Megatron's, with which the same model reaches 163 TFLOP/s (Narayanan et al., table 1), not 113 to 126. The published "
            "seconds lie on a line: 0.20 s for each of 240, 192 and 160 micro-batches, and 12.7 s beside them, of which the bubble is "
            "6.7; what the other 6 s are the paper does not say",
        )
        for gpus, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
    ]
    job = _SC21_JOB | {"global_batch": 2048, "micro_batch": 2, "stage": 1}
    source = "BigScience, BLOOM, 2022: arXiv 2211.05100, and 150 TFLOP/s by bigscience.notion.site"
    tokens = 150e12 / _gpt_operations(bloom, again=True)
    jean_zay = replace(
        A100_UNFUSED, nics_per_node=4, nic_bandwidth=12.5e9
    )  # four Omni-Path links of 100 Gb/s
    assumed = "nobody ran context parallelism then, with which some layouts are faster here"
    sizes = {"tp": 4, "pp": 12, "dp": 8}
    runs.append(Run("BLOOM 176B", source, bloom, jean_zay, sizes, job, tokens=tokens, assumed=assumed))
    return runs


_QWEN = Model(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocab=151936)
_QWEN_3 = {
    "30B": replace(_QWEN, experts=128, top_k=8, expert_ffn=768),
    "235B": replace(
        _QWEN, layers=94, hidden=4096, heads=64, ffn=12288, experts=128, top_k=8, expert_ffn=1536
    ),
}
# model, GPUs, batch, micro-batch, tokens of a sequence, tp, pp, cp, stages a rank, tokens a second and GPU
_NEMO = (
    ("GPT3-5B", _gpt(24, 4096, 32), 64, 2048, 4, 2048, 1, 1, 1, 1, 22521),
    ("GPT3-20B", _gpt(44, 6144, 48), 64, 256, 2, 2048, 2, 1, 1, 1, 5851),
    ("GPT3-175B", _gpt(96, 12288, 96), 128, 256, 1, 2048, 4, 8, 1, 6, 726),
    ("GPT3-175B", _gpt(96, 12288, 96), 512, 2048, 2, 2048, 4, 8, 1, 6, 782),
    ("Llama 2 7B", _LLAMA_2["7B"], 8, 128, 1, 4096, 1, 1, 1, 1, 16847),
    ("Llama 2 13B", _LLAMA_2["13B"], 16, 128, 1, 4096, 1, 4, 1, 10, 8646),
    ("Llama 2 70B", _LLAMA_2["70B"], 64, 128, 1, 4096, 4, 4, 1, 20, 1707),
    (
        "Nemotron-8B",
        Model(layers=32, hidden=4096, heads=32, vocab=256000),
        *(64, 256, 4, 4096, 2, 1, 1, 1, 12701),
    ),
    (
        "Nemotron-22B",
        Model(layers=40, hidden=6144, heads=48, vocab=256000),
        *(64, 256, 2, 4096, 2, 4, 1, 10, 4256),
    ),
    ("Nemotron-340B", _NEMOTRON_340B, 128, 32, 1, 4096, 8, 8, 1, 12, 322),
    ("Llama 3 8B", LLAMA_8B, 8, 128, 1, 8192, 1, 1, 2, 1, 12036),
    ("Llama 3 70B", LLAMA_70B, 64, 128, 1, 8192, 4, 4, 2, 5, 1533),
)
# hardware, model, GPUs, precision, stage of ZeRO (3 where the page has FSDP), batch, micro-batch, tokens of a sequence, tp, pp, cp,
# stages a rank, ep, tokens a second and GPU
_BRIDGE = (
    ("h100", "Llama 3 8B", LLAMA_8B, 8, "fp8", 3, 128, 1, 8192, 1, 1, 1, 1, 1, 14451),
    ("h100", "Llama 3 70B", LLAMA_70B, 64, "fp8", 1, 128, 1, 8192, 4, 8, 1, 5, 1, 1602),
    ("h100", "Llama 3.1 405B", LLAMA_405B, 1024, "fp8", 1, 512, 1, 8192, 8, 8, 2, 8, 1, 292),
    ("h100", "Qwen3 30B", _QWEN_3["30B"], 16, "fp8", 1, 512, 2, 4096, 1, 2, 1, 24, 8, 5275),
    ("b200", "Llama 3 8B", LLAMA_8B, 8, "fp8", 1, 128, 2, 8192, 1, 1, 1, 1, 1, 30624),
    ("b200", "Llama 3.1 405B", LLAMA_405B, 128, "fp8", 1, 64, 1, 8192, 4, 8, 2, 8, 1, 661),
    ("b200", "DeepSeek-V3", DEEPSEEK_V3, 256, "fp8", 1, 2048, 1, 4096, 1, 16, 1, 1, 8, 2139),
    ("b200", "Qwen3 30B", _QWEN_3["30B"], 8, "fp8", 1, 512, 1, 4096, 1, 1, 1, 1, 8, 9299),
    ("b200", "Qwen3 235B", _QWEN_3["235B"], 64, "fp8", 1, 1024, 1, 4096, 1, 8, 1, 2, 8, 3269),
    ("gb200-nvl72", "Llama 3 8B", LLAMA_8B, 8, "fp8", 1, 128, 2, 8192, 1, 1, 1, 1, 1, 31508),
    ("gb200-nvl72", "Llama 3 70B", LLAMA_70B, 64, "fp8", 3, 256, 2, 8192, 1, 1, 1, 1, 1, 4312),
    ("gb200-nvl72", "Llama 3.1 405B", LLAMA_405B, 256, "fp8", 1, 1536, 1, 8192, 4, 16, 1, 4, 1, 813),
    ("gb200-nvl72", "DeepSeek-V3", DEEPSEEK_V3, 256, "bf16", 1, 4096, 1, 4096, 1, 4, 1, 4, 64, 3139),
    ("gb200-nvl72", "DeepSeek-V3", DEEPSEEK_V3, 256, "fp8", 1, 4096, 1, 4096, 1, 8, 1, 4, 32, 4018),
    ("gb200-nvl72", "Qwen3 30B", _QWEN_3["30B"], 8, "fp8", 1, 512, 4, 4096, 1, 1, 1, 1, 8, 23766),
    ("gb200-nvl72", "Qwen3 235B", _QWEN_3["235B"], 256, "bf16", 1, 8192, 1, 4096, 1, 8, 1, 3, 32, 4916),
)
_NEMO_PAGE = "NVIDIA, NeMo 24.07, docs/source/performance/performance_summary.md"
_BRIDGE_PAGE = "NVIDIA, Megatron Bridge 25.11, docs/performance-summary.md"
_NVIDIA_ASSUMED = (
    "gradients of 2 bytes, as its recipes reduce them; nothing computed again and nothing offloaded, which the page does not say; "
    "attention in fp8 and communication inside of products are not counted; the page gives the one layout that its authors chose"
)
_SMALL_EXPERTS = (
    "; small experts are many small kernels, and the time that the host takes to launch them is not counted: the page for 25.09 has "
    "10,494 and 18,066 tokens a second for Qwen3 30B on H100 and B200, twice as much, on the same layouts"
)


def _nvidia() -> list[Run]:
    """Return the runs of two pages of NVIDIA's: all whose model and hardware can be told, and that have every column."""
    rows: list[tuple[Any, ...]] = []
    for name, model, gpus, batch, micro_batch, seq, *degrees, turns, tokens in _NEMO:
        title = f"{name}, {gpus} GPUs, {seq} tokens"
        rows.append(
            (
                _NEMO_PAGE,
                title,
                "h100",
                model,
                gpus,
                "fp8",
                1,
                batch,
                micro_batch,
                seq,
                *degrees,
                turns,
                1,
                tokens,
            )
        )
    for kind, name, model, gpus, precision, *others in _BRIDGE:
        title = f"{name}, {gpus} {kind.partition('-')[0].upper()}, {precision}"
        rows.append((_BRIDGE_PAGE, title, kind, model, gpus, precision, *others))
    runs = []
    for (
        page,
        title,
        kind,
        model,
        gpus,
        precision,
        stage,
        batch,
        micro_batch,
        seq,
        tp,
        pp,
        cp,
        turns,
        ep,
        tokens,
    ) in rows:
        job = {
            "seq": seq,
            "global_batch": batch,
            "micro_batch": micro_batch,
            "precision": precision,
            "stage": stage,
        }
        job |= {"stages_per_rank": turns, "sequence_parallel": tp > 1, "trainer": "megatron"}
        job |= {"checkpointing": "none"}
        sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": gpus // tp // pp // cp, "ep": ep}
        assumed = _NVIDIA_ASSUMED + (_SMALL_EXPERTS if model.experts else "")
        runs.append(Run(title, page, model, load_hardware(kind), sizes, job, tokens=tokens, assumed=assumed))
    return runs


RUNS = (
    *_megatron_2021(),
    *_korthikanti(),
    *_llama_3(),
    *_deepseek(),
    *_torchtitan_8b(),
    *_torchtitan_large(),
    *_tried_afterwards(),
    *(replace(run, group=GROUPS[1]) for run in _llm_foundry(H100_TRITON, _MORE_MPT)),
    *(replace(run, group=GROUPS[2]) for run in _llm_foundry(A100_TRITON, _MPT_A100)),
    *(replace(run, group=GROUPS[2]) for run in _nvidia()),
)
"""Every run, in the order of the tables."""
