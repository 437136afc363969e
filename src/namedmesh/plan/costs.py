"""Estimate the costs of a layout for a rank: bytes of memory, and bytes that each axis sends in a training step.

Estimates by published formulas, each named where it is used; activations are not part of the memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.plan.spec import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["STAGES", "Memory", "Model", "estimate_memory", "estimate_traffic", "parse_bytes", "parse_count"]

STAGES = (0, 1, 2, 3)
"""The stages of ZeRO; FSDP that shards everything is stage 3."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTES = {"b": 1}
_BYTES |= {f"{letter}b": 10 ** (3 * (i + 1)) for i, letter in enumerate("kmgt")}
_BYTES |= {f"{letter}ib": 2 ** (10 * (i + 1)) for i, letter in enumerate("kmgt")}
_HALF = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer; None is unknown.

    Args:
        layers: how many layers.
        heads: attention heads.
        kv_heads: heads of keys and values; by default as many as heads.
        hidden: width of the residual stream.
        vocab: entries of the vocabulary.
        seq: tokens of a sequence.
        params: parameters in all.
        experts: experts of a mixture-of-experts layer.
        top_k: experts that a token goes to.
        batch: sequences that a data-parallel rank works on in a step.
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
    batch: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs, activations aside."""

    stage: int
    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.weights + self.gradients + self.optimizer


def estimate_memory(params: int, *, tp: int = 1, pp: int = 1, data: int = 1, stage: int = 0) -> Memory:
    """Estimate the memory of weights, gradients and optimizer state in mixed-precision training with Adam.

    A rank has P = params / (tp x pp) parameters. Each takes 2 bytes as a weight, 2 as a gradient and 12 in the
    optimizer (a weight, a mean and a variance of 4 bytes each). Stage 1 divides the optimizer's part over the
    ``data`` ranks, stage 2 the gradients too, stage 3 (FSDP) the weights too. Source: Rajbhandari, Rasley,
    Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, sections 3.1
    and 5. Parameters are taken to be spread evenly over stages, and experts not to be spread over ep; activations,
    buffers and fragments come on top.

    Args:
        params: parameters of the whole model.
        tp: tensor-parallel size.
        pp: pipeline stages.
        data: how many ranks hold the same parameters and may share their state.
        stage: stage of ZeRO.

    Returns:
        Bytes.

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


def estimate_traffic(model: Model, sizes: Mapping[str, int], *, stage: int = 0) -> dict[str, float]:
    """Estimate the bytes that one rank sends in a training step, by axis, the most first; bfloat16 throughout.

    - dp: gradients are all-reduced, 2 (d-1)/d of their bytes in a ring; with stage 3, weights are gathered
      twice and gradients reduce-scattered, 3 (d-1)/d. d counts the context-parallel ranks too. Source: the ZeRO
      paper, section 7.
    - tp: four all-reduces of the activations in each layer, two forward and two backward. Source: Shoeybi et
      al., "Megatron-LM", 2019, section 3.
    - pp: activations go to the next stage, and their gradients back. Source: Narayanan et al., "Efficient
      Large-Scale Language Model Training on GPU Clusters", SC 2021, section 3.2.
    - cp: keys and values go once round the ring forward, and with their gradients backward. Source: Liu,
      Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.
    - ep: tokens go to their experts and back, forward and backward, an all-to-all each time, in every layer.
      Source: Lepikhin et al., "GShard", 2020, section 3.

    Args:
        model: the sizes; an axis whose sizes are not known is left out.
        sizes: the size of each axis, ``dp``, ``tp``, ``pp``, ``cp`` and ``ep``.
        stage: stage of ZeRO.

    Returns:
        Bytes by axis; axes of size 1 are left out.

    Example:
        >>> model = Model(layers=32, heads=32, hidden=4096, seq=4096, params=7_000_000_000)
        >>> {axis: f"{sent / 1e9:.1f} GB" for axis, sent in estimate_traffic(model, {"dp": 2, "tp": 8}).items()}
        {'tp': '7.5 GB', 'dp': '1.8 GB'}
    """
    tp, pp, cp, ep = (sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    data = sizes.get("dp", 1) * cp
    traffic: dict[str, float] = {}
    if model.params is not None and data > 1:
        rounds = 3 if stage >= 3 else 2  # noqa: PLR2004  the stage that gathers weights
        traffic["dp"] = rounds * (data - 1) / data * _HALF * model.params / (tp * pp)
    if model.layers is not None and model.hidden is not None and model.seq is not None:
        layers = model.layers / pp
        activations = _HALF * model.batch * model.seq / cp * model.hidden
        heads = model.heads or 1
        kv = activations * 2 * (model.kv_heads or heads) / heads / tp
        traffic["tp"] = layers * 4 * 2 * (tp - 1) / tp * activations
        traffic["pp"] = (2 * activations) if pp > 1 else 0
        traffic["cp"] = layers * 3 * (cp - 1) * kv
        traffic["ep"] = layers * 4 * model.top_k * (ep - 1) / ep * activations / tp
    ranked = sorted(traffic.items(), key=lambda item: -item[1])
    return {axis: sent for axis, sent in ranked if sent}


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
    if match is None or match[2] not in units or not float(match[1]):
        raise UsageError(f"{text!r} is not {what}")
    return round(float(match[1]) * units[match[2]])
