"""What is trained, how, and over which ranks: a model with ten knobs, and the sizes of the axes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh.errors import did_you_mean
from namedmesh.plan.hardware import Hardware, load_hardware
from namedmesh.plan.model import Model
from namedmesh.plan.spec import size_problems

if TYPE_CHECKING:
    from collections.abc import Mapping

CHOICES: dict[str, tuple[int | str, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": ("bf16", "fp8", "fp32"),
    "trainer": ("torch", "megatron"),
    "checkpointing": ("none", "selective", "full"),
}
"""The values of the fields of :class:`Job` that have few."""
WEIGHTS = 3  # the stage of ZeRO that shards them


class Axes(NamedTuple):
    """The size of each axis, in Megatron's order of ranks: tp-cp-dp-pp, and etp-ep-edp-pp for experts."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    dp_replicate: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """Over how many ranks ZeRO divides what is not of experts."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def edp(self) -> int:
        """How many ranks have the same experts."""
        return max(1, self.tp * self.dp * self.cp // (self.ep * self.etp))

    @property
    def expert_shards(self) -> int:
        """Over how many ranks ZeRO divides experts."""
        return max(1, self.edp // self.dp_replicate)


def axes_of(sizes: Mapping[str, int]) -> Axes:
    """Return the sizes of the axes, of which dp_replicate is a part of dp; without ``ep``, an expert is divided over tp."""
    known = {axis: size for axis, size in sizes.items() if axis in Axes._fields}
    if "dp_shard" in sizes:
        known["dp"] = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    if "etp" not in known and known.get("ep", 1) == 1:
        known["etp"] = known.get("tp", 1)
    return Axes(**known)


@dataclass(frozen=True)
class Job:
    """A model, how it is trained, and on what.

    Where ``micro_batch``, ``stage`` or ``checkpointing`` is None, ``list_partitions`` looks for the best, and an estimate takes
    1, 3 (Megatron's: 1) and "selective". Another None is unknown, and what needs it is left out.

    Args:
        model: the model.
        hardware: the GPUs and their links.
        seq: tokens of a sequence.
        global_batch: sequences of a step, over all ranks.
        micro_batch: sequences that a data-parallel rank works on at a time.
        stage: of ZeRO: 1 shards the optimizer's state, 2 the gradients too, 3 (FSDP) the weights too.
        precision: numbers of the matrix products; activations are in bf16 with fp8 as well.
        trainer: whose layers, loss and optimizer are counted: torch's with FSDP2, or Megatron's.
        checkpointing: what is computed again for the backward pass: nothing; "selective", with torch all but attention and every
            second matrix product (torchtitan's "selective op"), with Megatron attention's scores; "full", whole layers.
        sequence_parallel: whether the tensor-parallel ranks share the norms and the residual stream too.
        fused_loss: whether the loss is one compiled kernel, or torch's eager operations with their copies of the logits.
        stages_per_rank: stages of each pipeline rank; 2 or more is the interleaved schedule.
    """

    model: Model = field(default_factory=Model)
    hardware: Hardware = field(default_factory=lambda: load_hardware("h100"))
    seq: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    stage: int | None = None
    precision: str = "bf16"
    trainer: str = "torch"
    checkpointing: str | None = None
    sequence_parallel: bool = True
    fused_loss: bool = False
    stages_per_rank: int = 1

    @cached_property
    def known(self) -> dict[object, Any]:
        """What many layouts share: the stages of pipelines, the numbers of layers."""
        return {}

    @cached_property
    def missing(self) -> list[str]:
        """The names of the sizes that the seconds of a step follow from, and that are not known."""
        sizes = {name: getattr(self.model, name) for name in ("layers", "hidden", "heads")}
        sizes |= {"seq": self.seq, "global_batch": self.global_batch}
        return [name for name, size in sizes.items() if size is None]

    @property
    def settled(self) -> Job:
        """The job with a value for what may be searched."""
        if None not in {self.micro_batch, self.stage, self.checkpointing}:
            return self
        stage = (3 if self.is_torch else 1) if self.stage is None else self.stage
        checkpointing = self.checkpointing or "selective"
        return replace(self, micro_batch=self.micro_batch or 1, stage=stage, checkpointing=checkpointing)

    @cached_property
    def number_bytes(self) -> int:
        """Bytes of an activation and of a weight that computes."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes of a parameter's weight, gradient and optimizer state.

        Adam's state has the weight and two moments in float32 (Rajbhandari et al., ZeRO, SC 2020, section 3.1). Megatron keeps
        gradients in float32; its fp8 recipes in bf16 (``grad_reduce_in_fp32``, Megatron Bridge).
        """
        if self.precision == "fp32":
            return 4, 4, 8
        return 2, 4 if self.trainer == "megatron" and self.precision == "bf16" else 2, 12

    @cached_property
    def is_torch(self) -> bool:
        """Whether torch's layers are counted."""
        return self.trainer == "torch"

    @property
    def again(self) -> float:
        """Which part of the matrix products is computed again."""
        return {"full": 1.0, "selective": 0.5 if self.is_torch else 0.0}.get(self.checkpointing or "", 0.0)

    def problems(self) -> list[str]:
        """Return a sentence for each thing that does not go with another."""
        sizes = ("seq", "global_batch", "micro_batch", "stages_per_rank")
        problems = size_problems({name: getattr(self, name) for name in sizes}) + self.model.problems()
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (value is None and name in {"stage", "checkpointing"}):
                near = did_you_mean(value, map(str, allowed))
                problems.append(f"{name} {value!r} is not one of {allowed}{near}")
        if self.precision in CHOICES["precision"] and self.precision not in self.hardware.peak:
            problems.append(
                f"{self.hardware.name} has no {self.precision}; it has {', '.join(self.hardware.peak)}"
            )
        return problems

    def micro_batches(self, dp: int) -> int | None:
        """Return how many micro-batches a data-parallel rank has in a step; None where they do not divide it."""
        each = dp * (self.micro_batch or 1)
        return None if self.global_batch is None or self.global_batch % each else self.global_batch // each
