"""How a model is trained: batch, policies and schedule; and how a layout divides it over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.errors import did_you_mean
from namedmesh.plan.hardware import Hardware, load_hardware
from namedmesh.plan.model import Model
from namedmesh.plan.spec import size_problems
from namedmesh.sizes import SharedHeads, stage_range

if TYPE_CHECKING:
    from collections.abc import Mapping

CHOICES: dict[str, tuple[str, ...] | tuple[int, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": ("bf16", "fp8", "fp32"),
    "trainer": ("torch", "megatron"),
    "checkpointing": ("none", "selective", "op", "full"),
    "recompute": ("layernorm", "mla_up_proj", "moe_act"),
    "context_attention": ("gathered", "torch", "ring"),
    "schedule": ("1f1b", "gpipe", "zero-bubble", "dualpipe"),
    "state_bytes": (16, 18),
    "optimizer_bytes": (12, 8),
}
"""The values of the fields of :class:`Job` that have few."""
WHOLE_WEIGHTS = 3  # the stage of ZeRO that shards them


class Axes(NamedTuple):
    """The size of each axis, in Megatron's order of ranks: tp-cp-dp-pp, and etp-ep-edp-pp for experts."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def data(self) -> int:
        """How many ranks have the same weights, experts aside."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """How many ranks have the same experts."""
        return max(1, self.tp * self.data // (self.ep * self.etp))


def axes_of(sizes: Mapping[str, int]) -> Axes:
    """Return the sizes of the axes; without an ``ep`` of its own, an expert is divided over tp as the rest is."""
    known = {axis: size for axis, size in sizes.items() if axis in Axes._fields}
    if "etp" not in known and known.get("ep", 1) == 1:
        known["etp"] = known.get("tp", 1)
    return Axes(**known)


@dataclass(frozen=True)
class Job:
    """A model, how it is trained, and on what. None is unknown, and what needs it is then left out.

    Args:
        model: the model.
        hardware: the GPUs and their links.
        seq: tokens of a sequence.
        global_batch: sequences of a step, over all ranks; what does not divide it is ruled out.
        micro_batch: sequences that a data-parallel rank works on at a time.
        stage: of ZeRO: 1 shards the optimizer's state, 2 the gradients too, 3 (FSDP) the weights too.
        precision: numbers of the matrix products, as far as the hardware has them; activations are in bf16 with fp8 as well.
        trainer: whose layers, loss and optimizer are counted: torch's with FSDP2, as torchtitan and the training example have
            them, or Megatron's.
        checkpointing: what is computed again for the backward pass: nothing; attention's scores (Megatron's "selective"); all
            but attention and every second matrix product (torchtitan's "selective op"); whole layers.
        recompute: what "selective" computes again too, by Megatron's names: norms; queries, keys and values of latent
            attention; gates of experts.
        sequence_parallel: whether the tensor-parallel ranks share the norms and the residual stream too.
        compiled: whether ``torch.compile`` fuses elementwise operations, or each is a kernel; Megatron's are fused in any case.
        fused_attention: whether attention's scores stay on the chip (FlashAttention), or are written to memory.
        fused_loss: whether the loss is one compiled kernel, or torch's eager operations with their copies of the logits.
        fused_norms: whether norms are one kernel and keep their input only, or also its normalized values, as torch's RMSNorm
            does on the CPU, and before torch 2.9.
        dropout: whether the layers have dropout, whose masks are kept.
        context_attention: how attention over cp gets keys and values: gathered, by ``namedmesh.training.context_attention``;
            gathered with the heads repeated for all queries, by torch's ``context_parallel`` in torchtitan's models; round a
            ring, as Megatron does, which is its default.
        schedule: the order of a pipeline's micro-batches.
        stages_per_rank: stages of each pipeline rank; 2 or more is the interleaved schedule.
        state_bytes: bytes of weight, gradient and Adam's state of a parameter: with gradients of 2 bytes, or of 4, as Megatron
            keeps them by default.
        optimizer_bytes: those of Adam's state among them: the weight and two moments in float32, or the moments in bf16
            (DeepSeek-V3, 2024, section 3.3.3), which are 4 fewer than ``state_bytes`` says.
        fp8_inputs: whether products and gates keep their inputs for the backward pass in fp8, and attention's output in 12
            bits (the same section), instead of in bf16.
        overlap: whether gathers of weights and reductions of gradients run beside the computation.
    """

    model: Model = field(default_factory=Model)
    hardware: Hardware = field(default_factory=lambda: load_hardware("h100"))
    seq: int | None = None
    global_batch: int | None = None
    micro_batch: int = 1
    stage: int = 3
    precision: str = "bf16"
    trainer: str = "torch"
    checkpointing: str = "selective"
    sequence_parallel: bool = True
    compiled: bool = True
    fused_attention: bool = True
    fused_loss: bool = False
    fused_norms: bool = True
    dropout: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    state_bytes: int | None = None
    optimizer_bytes: int = 12
    recompute: tuple[str, ...] = ()
    fp8_inputs: bool = False
    context_attention: str | None = None
    overlap: bool = True

    @property
    def missing(self) -> list[str]:
        """The names of the sizes that the seconds of a step follow from, and that are not known."""
        sizes = {name: getattr(self.model, name) for name in ("layers", "hidden", "heads")}
        sizes |= {"seq": self.seq, "global_batch": self.global_batch}
        return [name for name, size in sizes.items() if size is None]

    @property
    def sized(self) -> bool:
        """Whether the sizes that activations follow from are known: all but the global batch."""
        return self.missing in ([], ["global_batch"])

    @property
    def number_bytes(self) -> int:
        """Bytes of an activation and of a weight that computes."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of a parameter."""
        return (self.state_bytes or (18 if self.trainer == "megatron" else 16)) - 14

    @property
    def keys_over_cp(self) -> str:
        """How attention over cp gets keys and values."""
        return self.context_attention or ("gathered" if self.is_torch else "ring")

    @property
    def is_torch(self) -> bool:
        """Whether torch's layers are counted."""
        return self.trainer == "torch"

    @property
    def passes(self) -> int:
        """How often a layer is computed: forward, backward, and perhaps again."""
        return 3 if self.checkpointing == "full" else 2

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded, and gathered to compute."""
        return self.stage == WHOLE_WEIGHTS

    def problems(self) -> list[str]:
        """Return a sentence for each thing that does not go with another."""
        sizes = ("seq", "global_batch", "micro_batch", "stages_per_rank")
        problems = size_problems({name: getattr(self, name) for name in sizes}) + self.model.problems()
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            for one in values:
                if one not in allowed and one != getattr(Job, name):  # None, where that is the default
                    near = did_you_mean(one, map(str, allowed))
                    problems.append(f"{name} {one!r} is not one of {allowed}{near}")
        if "mla_up_proj" in self.recompute and self.model.kv_rank is None:
            problems.append(
                "recompute has mla_up_proj, but attention is not latent; give kv_rank, or leave it out"
            )
        if "moe_act" in self.recompute and not self.model.experts:
            problems.append("recompute has moe_act, but there are no experts; give experts, or leave it out")
        if self.recompute and self.checkpointing != "selective":
            problems.append(
                f"recompute goes with selective checkpointing, not with {self.checkpointing}; leave one out"
            )
        if self.precision in CHOICES["precision"] and self.precision not in self.hardware.peak:
            problems.append(
                f"{self.hardware.name} has no {self.precision}; it has {', '.join(self.hardware.peak)}"
            )
        if self.stages_per_rank > 1 and self.schedule != "1f1b":
            problems.append(
                f"{self.stages_per_rank} stages a rank are interleaved by 1f1b, not by {self.schedule}; leave one out"
            )
        return problems

    def micro_batches(self, dp: int) -> int | None:
        """Return how many micro-batches a data-parallel rank has in a step; None where they do not divide it."""
        if self.global_batch is None or self.global_batch % (dp * self.micro_batch):
            return None
        return self.global_batch // (dp * self.micro_batch)


class Share(NamedTuple):
    """What a pipeline rank has of a model: layers without and with experts, and perhaps the embedding and the head."""

    rank: int
    dense: int
    expert: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.dense + self.expert


def share_of(job: Job, pp: int, rank: int) -> Share:
    """Return what a pipeline rank has, by the stages that ``namedmesh.training.stage_layers`` makes.

    DualPipe keeps the stages of two ranks on each, and sends micro-batches in from both ends.
    """
    indices, stages = [rank + pp * turn for turn in range(job.stages_per_rank)], pp * job.stages_per_rank
    if job.schedule == "dualpipe" and pp > 1:
        indices, stages = [rank, pp - 1 - rank], pp
    first, last = 0 in indices, stages - 1 in indices
    layers = [layer for index in indices for layer in stage_range(job.model.layers or 0, index, stages)]
    dense = sum(layer < (job.model.layers or 0) - job.model.expert_layers for layer in layers)
    return Share(rank, dense, len(layers) - dense, first, last)


@lru_cache(maxsize=4096)
def shares(job: Job, pp: int) -> tuple[Share, ...]:
    """Return the pipeline ranks that may need the most memory or time: the first, the first of the longest, the last."""
    every = [share_of(job, pp, rank) for rank in range(min(pp, job.model.layers or 1))]
    longest = max(every, key=lambda share: (share.layers, share.expert))
    return tuple(dict.fromkeys((every[0], longest, every[-1])))


def in_flight(job: Job, pp: int, rank: int, micro_batches: int | None) -> float:
    """Return how many micro-batches a pipeline rank keeps the activations of, of all its layers.

    1F1B keeps one for each rank from here to the end; interleaved with v stages a rank, (2 (p-r-1) + (v-1) p + 1) / v
    (Megatron-LM, ``schedules.py``; for the first rank that is Korthikanti et al., MLSys 2023, section 4.2.3); GPipe all
    of them; DualPipe p + 1 of half of its layers (DeepSeek-V3, 2024, table 2). Never more than there are.
    """
    turns = job.stages_per_rank
    if job.schedule == "gpipe":
        most = float(micro_batches or pp)
    elif job.schedule == "dualpipe" and pp > 1:
        most = (pp + 1) / 2
    elif turns > 1 and pp > 1:
        most = (2 * (pp - rank - 1) + (turns - 1) * pp + 1) / turns
    else:
        most = pp - rank
    return most if micro_batches is None else min(most, micro_batches)


def bubble(job: Job, pp: int) -> float:
    """Return how long a pipeline rank idles in a step, in times of one micro-batch through its layers.

    1F1B and GPipe: (p-1) / v (Narayanan et al., SC 2021, section 2.2). Zero bubble (ZB-H1) and DualPipe: (p-1)(F+B-2W)
    and (p/2-1)(F&B+B-3W) (DeepSeek-V3, 2024, table 2), with B = 2 F, W = F and F&B = F + B.
    """
    if job.schedule == "zero-bubble":
        return (pp - 1) / 3
    if job.schedule == "dualpipe":
        return max(0.0, pp / 2 - 1) * 2 / 3
    return (pp - 1) / job.stages_per_rank


def kv_heads_on_rank(model: Model, tp: int) -> int:
    """Return how many kv heads a tensor-parallel rank computes, by ``KeyValueParallel`` where tp does not divide them."""
    if model.kv % tp == 0:
        return model.kv // tp
    return len(SharedHeads(model.heads or model.kv, model.kv, tp).of_rank(0))
