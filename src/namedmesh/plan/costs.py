"""Estimate the costs of a layout for a rank: bytes of memory, and bytes that each axis sends in a training step.

Estimates by published formulas, each named where it is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from namedmesh.plan.spec import UsageError, size_problems

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

STAGES = (0, 1, 2, 3)
"""The stages of ZeRO; FSDP that shards everything is stage 3."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTES = {"b": 1}
_BYTES |= {f"{letter}b": 10 ** (3 * (i + 1)) for i, letter in enumerate("kmgt")}
_BYTES |= {f"{letter}ib": 2 ** (10 * (i + 1)) for i, letter in enumerate("kmgt")}
CHECKPOINTING = ("none", "selective", "full")
"""Which activations are computed again for the backward pass."""
# An H100 SXM: dense bfloat16 operations, and bytes in one direction by NVLink and by one port of 400 Gb/s.
_FLOPS, _INSIDE, _ACROSS = 989e12, 450e9, 50e9
_HALF = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer, and how a step works through its batch; None is unknown.

    Args:
        layers: how many layers.
        heads: attention heads.
        kv_heads: heads of keys and values; by default as many as heads.
        hidden: width of the residual stream.
        vocab: entries of the vocabulary.
        seq: tokens of a sequence.
        params: parameters in all, those of the experts included.
        experts: experts of a layer; every layer has them.
        top_k: experts that a token goes to.
        ffn: inner width of an expert, or of the feed-forward network, which is gated then; by default 4 x hidden,
            not gated.
        expert_params: parameters of all experts of all layers; by default ``3 x hidden x ffn`` for each expert of
            each layer, the three matrices of a gated network, where ``ffn`` is known.
        batch: sequences that a data-parallel rank works on in a step.
        micro_batch: how many of them it works on at a time.
        checkpointing: which activations are computed again for the backward pass, one of :data:`CHECKPOINTING`.
        sequence_parallel: whether the tensor-parallel ranks share the norms and the residual stream too.
        fused_norms: whether norms keep their input only, as on a GPU, or also its normalized values, as torch's RMSNorm
            does on the CPU.
    """

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    seq: int | None = None
    params: int | None = None
    experts: int | None = None
    top_k: int = 1
    ffn: int | None = None
    expert_params: int | None = None
    batch: int = 1
    micro_batch: int = 1
    checkpointing: str = "selective"
    sequence_parallel: bool = False
    fused_norms: bool = True

    @property
    def of_experts(self) -> int:
        """The parameters of all experts, as far as the sizes tell."""
        if self.expert_params is not None or not self.experts:
            return self.expert_params or 0
        return 3 * (self.hidden or 0) * (self.ffn or 0) * (self.layers or 0) * self.experts

    @property
    def shared(self) -> int:
        """The parameters outside of the experts."""
        return (self.params or 0) - self.of_experts

    def problems(self) -> list[str]:
        """Return a sentence for each size that does not go with another."""
        sizes = {
            name: value
            for name, value in vars(self).items()
            if type(value) is not bool and not isinstance(value, str)
        }
        problems = size_problems(sizes)
        if self.checkpointing not in CHECKPOINTING:
            problems.append(f"checkpointing {self.checkpointing!r} is not one of {CHECKPOINTING}")
        if self.experts is not None and self.top_k > self.experts:
            problems.append(
                f"a token goes to {self.top_k} of {self.experts} experts; top_k is {self.experts} at most"
            )
        if not problems and self.batch % self.micro_batch:
            problems.append(
                f"a batch of {self.batch} does not divide into micro-batches of {self.micro_batch}"
            )
        if self.params is not None and self.of_experts > self.params:
            problems.append(
                f"the experts have {self.of_experts} parameters of {self.params} in all; give expert_params, or other sizes"
            )
        return problems


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0

    @property
    def total(self) -> float:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(params: int, *, tp: int = 1, pp: int = 1, data: int = 1, stage: int = 0) -> Memory:
    """Estimate the memory of weights, gradients and optimizer state in mixed-precision training with Adam.

    A rank has P = params / (tp x pp) parameters. Each takes 2 bytes as a weight, 2 as a gradient and 12 in the
    optimizer (a weight, a mean and a variance of 4 bytes each); float32 throughout takes 16 too. Stage 1 divides
    the optimizer's part over the ``data`` ranks, stage 2 the gradients too, stage 3 (FSDP) the weights too.
    Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020, sections 3.1 and 5. Parameters are taken to be spread evenly over stages; buffers and
    fragments come on top.

    Args:
        params: parameters of the whole model.
        tp: tensor-parallel size.
        pp: pipeline stages.
        data: how many ranks hold the same parameters and may share their state.
        stage: stage of ZeRO.

    Returns:
        Bytes, without activations.

    Example:
        >>> estimate_memory(7_500_000_000, data=64, stage=0).total / 1e9      # the paper's own example
        120.0
        >>> [round(estimate_memory(7_500_000_000, data=64, stage=s).total / 1e9, 1) for s in (1, 2, 3)]
        [31.4, 16.6, 1.9]
    """
    mine = params / (tp * pp)
    return Memory(
        stage,
        weights=2 * mine / (data if stage >= 3 else 1),  # noqa: PLR2004  the stage that divides weights
        gradients=2 * mine / (data if stage >= 2 else 1),  # noqa: PLR2004  the one that divides gradients
        optimizer=12 * mine / (data if stage >= 1 else 1),
    )


def estimate_model_memory(model: Model, sizes: Mapping[str, int], *, stage: int = 0) -> Memory:
    """Estimate the memory of a rank: :func:`estimate_memory` of what all experts share and of the experts, and activations.

    Experts are divided over ``ep x etp x pp`` ranks, and replicated over the ``edp`` ranks that are left of a stage.
    At stage 3 the weights and gradients of one layer are whole for a while; they are counted where ``layers`` is known.

    ``benchmarks/memory.py`` compares it with what torch allocates in the training example on the CPU, over six layouts of
    8 ranks: the estimate is 0 to 4 % too low for weights, gradients and optimizer, and from 6 % too low to 1 % too high
    for all of it with the activations.

    Args:
        model: the sizes; the number of parameters is known.
        sizes: the size of each axis.
        stage: stage of ZeRO.

    Example:
        >>> model = Model(params=46_000_000_000, experts=8, expert_params=45_000_000_000)
        >>> [round(estimate_model_memory(model, {"dp": 8, "ep": ep}).weights / 1e9) for ep in (1, 8)]
        [92, 13]
    """
    tp, pp, cp, dp, ep, etp = _sizes(sizes)
    shared = estimate_memory(model.shared, tp=tp, pp=pp, data=dp * cp, stage=stage)
    own = estimate_memory(
        model.of_experts, tp=ep * etp, pp=pp, data=max(1, tp * cp * dp // (ep * etp)), stage=stage
    )
    layer = 0.0
    if stage >= 3 and model.layers:  # noqa: PLR2004  the stage that gathers weights
        layer = _HALF * (model.shared / tp + model.of_experts / (ep * etp)) / model.layers
    return Memory(
        stage,
        shared.weights + own.weights + layer,
        shared.gradients + own.gradients + layer,
        shared.optimizer + own.optimizer,
        estimate_activations(model, sizes),
    )


def estimate_activations(model: Model, sizes: Mapping[str, int]) -> float:
    """Estimate the bytes of activations that the first pipeline stage keeps for the backward pass, in bfloat16.

    A layer keeps s b h (10 + 24/t + 5 a s / (h t)) bytes for s tokens, b sequences, h features, a heads and t
    tensor-parallel ranks; with ``sequence_parallel`` the 10 is divided by t too. The last term is the matrix of
    attention weights: ``"selective"`` checkpointing drops it, as fused attention does, and ``"full"`` keeps the
    2 s b h bytes of the layer's input alone. The first of p stages holds p micro-batches of its L/p layers. Source:
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, table 2 and
    section 4.2.3. Of the 34, 16 are two tensors of the inner width, 4 h in the paper; with ``ffn`` they are the four
    of a gated network, 8 ffn / h. The feed-forward part counts once for each expert of a token. Dropout is part of
    the formula. Without a pipeline the last norm and the logits add 4 s b (h + v) / t for v entries of the vocabulary
    (section 4.3 there). With ``sequence_parallel`` torch keeps the sequence that it gathers for attention and the
    feed-forward network, which Megatron gathers again: of the 24/t, 4 are not divided.

    Args:
        model: the sizes; 0 is returned if those that matter are not known.
        sizes: the size of each axis.

    Example:
        >>> model = Model(layers=96, heads=96, hidden=12288, seq=2048, checkpointing="none")
        >>> round(estimate_activations(model, {"tp": 8, "pp": 2}) / 1e9, 1)   # 96 x 2048 x 12288 x (13 + 10)
        55.6
    """
    if model.layers is None or model.hidden is None or model.seq is None:
        return 0.0
    tp, pp, cp, *_ = _sizes(sizes)
    inputs = model.micro_batch * model.seq / cp * model.hidden
    inner = 8 * model.ffn / model.hidden if model.ffn is not None else 16
    # Of the layer's 10, each half has a norm (2), what it is added to (2), and a mask of one byte.
    half = (5 if model.fused_norms else 7) / (tp if model.sequence_parallel else 1)
    if model.sequence_parallel:
        half += 2 - 2 / tp
    attention = half + 8 / tp
    if model.checkpointing == "none":
        attention += 5 * (model.heads or 1) * model.seq / cp / model.hidden / tp
    layer = 2.0 if model.checkpointing == "full" else attention + half + inner / tp * model.top_k
    logits = 4 * inputs * (1 + (model.vocab or 0) / model.hidden) / tp if pp == 1 else 0.0
    return model.layers * inputs * layer + logits


def estimate_traffic(model: Model, sizes: Mapping[str, int], *, stage: int = 0) -> dict[str, float]:
    """Estimate the bytes that one rank sends in a training step, by axis, the most first; bfloat16 throughout.

    - dp: gradients are all-reduced, 2 (d-1)/d of their bytes in a ring; with stage 3, weights are gathered
      twice and gradients reduce-scattered, 3 (d-1)/d. d counts the context-parallel ranks too. Source: the ZeRO
      paper, section 7. edp: likewise, the gradients of the experts.
    - tp: four all-reduces of the activations in each layer, two forward and two backward. Source: Shoeybi et
      al., "Megatron-LM", 2019, section 3. With experts, two of them are over etp, of the tokens that it holds.
    - pp: activations go to the next stage, and their gradients back. Source: Narayanan et al., "Efficient
      Large-Scale Language Model Training on GPU Clusters", SC 2021, section 3.2.
    - cp: keys and values go once round the ring forward, and with their gradients backward. Source: Liu,
      Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.
    - ep: tokens go to their experts and back, forward and backward, an all-to-all each time, in every layer.
      Source: Lepikhin et al., "GShard", 2020, section 3.

    Args:
        model: the sizes; an axis whose sizes are not known is left out.
        sizes: the size of each axis, ``dp``, ``tp``, ``pp``, ``cp``, ``ep`` and ``etp``.
        stage: stage of ZeRO.

    Returns:
        Bytes by axis; axes of size 1 are left out.

    Example:
        >>> model = Model(layers=32, heads=32, hidden=4096, seq=4096, params=7_000_000_000)
        >>> {axis: f"{sent / 1e9:.1f} GB" for axis, sent in estimate_traffic(model, {"dp": 2, "tp": 8}).items()}
        {'tp': '7.5 GB', 'dp': '1.8 GB'}
    """
    tp, pp, cp, dp, ep, etp = _sizes(sizes)
    data, replicas = dp * cp, max(1, tp * cp * dp // (ep * etp))
    traffic: dict[str, float] = {}
    if model.params is not None:
        rounds = 3 if stage >= 3 else 2  # noqa: PLR2004  the stage that gathers weights
        traffic["dp"] = rounds * (data - 1) / data * _HALF * model.shared / (tp * pp)
        traffic["edp"] = rounds * (replicas - 1) / replicas * _HALF * model.of_experts / (ep * etp * pp)
    if model.layers is not None and model.hidden is not None and model.seq is not None:
        layers = model.layers / pp
        activations = _HALF * model.batch * model.seq / cp * model.hidden
        heads = model.heads or 1
        kv = activations * 2 * (model.kv_heads or heads) / heads / tp
        traffic["tp"] = layers * (2 if model.experts else 4) * 2 * (tp - 1) / tp * activations
        if model.experts:
            traffic["etp"] = layers * 2 * 2 * (etp - 1) * model.top_k * activations / tp
        traffic["pp"] = (2 * activations) if pp > 1 else 0
        traffic["cp"] = layers * 3 * (cp - 1) * kv
        traffic["ep"] = layers * 4 * model.top_k * (ep - 1) / ep * activations / tp
    ranked = sorted(traffic.items(), key=lambda item: -item[1])
    return {axis: sent for axis, sent in ranked if sent}


def estimate_step(
    model: Model, sizes: Mapping[str, int], crossing: Collection[str] = (), *, stage: int = 0
) -> dict[str, float]:
    """Estimate the seconds of a training step on H100 GPUs if nothing overlaps: a measure to rank layouts by.

    - compute: 6 N + 12 L h s operations a token for N parameters that it meets, a third more with full
      checkpointing, at 989 TFLOP/s. Source: Chowdhery et al., "PaLM", 2022, appendix B.
    - bubble: (p-1)/m of that for p stages and m micro-batches. Source: Narayanan et al., section 2.2.
    - an axis: its bytes, at 450 GB/s inside a node (NVLink, one direction) and 50 GB/s across nodes (400 Gb/s a
      GPU).

    Args:
        model: the sizes; params, layers, hidden and seq are known.
        sizes: the size of each axis.
        crossing: the axes whose groups cross nodes.
        stage: stage of ZeRO.

    Example:
        >>> model = Model(layers=32, heads=32, hidden=4096, seq=4096, params=7_000_000_000, batch=8)
        >>> {part: round(seconds, 2) for part, seconds in estimate_step(model, {"tp": 2, "pp": 2, "dp": 2}).items()}
        {'compute': 0.4, 'bubble': 0.05, 'tp': 0.04, 'dp': 0.01, 'pp': 0.0}
    """
    tp, pp, cp, *_ = _sizes(sizes)
    active = model.shared + model.of_experts * model.top_k / (model.experts or 1)
    token = 6 * active + 12 * (model.layers or 0) * (model.hidden or 0) * (model.seq or 0)
    again = 4 / 3 if model.checkpointing == "full" else 1
    compute = again * token * model.batch * (model.seq or 0) / (tp * pp * cp) / _FLOPS
    parts = {"compute": compute, "bubble": compute * (pp - 1) * model.micro_batch / model.batch}
    for axis, sent in estimate_traffic(model, sizes, stage=stage).items():
        across = axis in crossing or (axis == "dp" and "cp" in crossing)
        parts[axis] = sent / (_ACROSS if across else _INSIDE)
    return {part: seconds for part, seconds in parts.items() if seconds}


def _sizes(sizes: Mapping[str, int]) -> tuple[int, int, int, int, int, int]:
    """Return the sizes of tp, pp, cp, dp, ep and etp; without experts of its own layout, etp is tp."""
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    return (
        tp,
        sizes.get("pp", 1),
        sizes.get("cp", 1),
        sizes.get("dp", 1),
        ep,
        sizes.get("etp", tp if ep == 1 else 1),
    )


def parse_count(text: str) -> int:
    """Parse a number of parameters: ``7B``, ``1.3e9``, ``350M``.

    Raises:
        UsageError: the text is none.

    Example:
        >>> parse_count("7B"), parse_count("350_000_000")
        (7000000000, 350000000)
    """
    return _scaled(text, _UNITS, "a number of parameters, such as 7B or 350M")


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: ``80GB``, ``80GiB``.

    Raises:
        UsageError: the text is none.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("1 GiB")
        (80000000000, 1073741824)
    """
    return _scaled(text, _BYTES, "an amount of memory, such as 80GB or 80GiB")


def _scaled(text: str, units: Mapping[str, int], what: str) -> int:
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?) *([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in units or not 0 < float(match[1]) < inf:
        raise UsageError(f"{text!r} is not {what}")
    return round(float(match[1]) * units[match[2]])
