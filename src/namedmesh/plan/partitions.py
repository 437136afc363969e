"""Every layout of a world, with the policies under which it is fastest; which fit, why one is faster; ``namedmesh partitions``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf, isqrt
from typing import Any, NamedTuple

from namedmesh.errors import LayoutError, UsageError, count_of
from namedmesh.plan.hardware import CARDS, load_hardware
from namedmesh.plan.memory import Memory, estimate_memory
from namedmesh.plan.model import Axes, Job, Model, list_options, read_config
from namedmesh.plan.settings import assumptions_of, settings_of
from namedmesh.plan.spec import EXIT_MISMATCH, format_table, parse_spec, positive_int
from namedmesh.plan.step import estimate_step
from namedmesh.sizes import shared_heads

MARGIN = 0.08
"""The part of a GPU's memory that stays free by default, for CUDA, NCCL and what the estimate does not know."""
# What a user would try by hand; a later policy costs more time, and needs less memory.
_MICRO_BATCHES, _STAGES, _CHECKPOINTING = (1, 2, 4), (1, 2, 3), ("none", "selective", "full")
_REPLICAS = 2  # sizes of dp_replicate that are tried beside 1: those with most of the sharding in fast links
_LEAST = 0.005  # the part of the whole from which on a difference is named
_NEAREST = 3  # partitions that are shown where none fits
_COLUMNS = (*Axes._fields, "mb", "stage", "again", "GB", "tokens/s", "time goes to", "ruled out")
_WORDS = """\
what is printed: a line for each layout, with the policies under which it is fastest.
  mb, stage, again    micro-batch, ZeRO's stage and checkpointing: as given, else the best that was found; selective: with torch all
                      but attention and every second product (torchtitan's "selective op"), with Megatron attention's scores
  GB                  that the fullest rank needs: weights, gradients and optimizer as ZeRO divides them; gathered, what FSDP holds
                      whole (embedding and head; in pipelines all weights and their gradients); activations; loss, copies of the
                      logits; backward, what one layer needs on top
  tokens/s            of the whole job
  time goes to        parts of a step: matmul, attention; elementwise, kernels that the memory bounds (norms, gates, copies); bubble,
                      where pipeline ranks wait for the first and the last micro-batch; optimizer; an axis, as far as its
                      communication does not run beside computation
  ruled out           why a layout cannot be trained, by its sizes, by its trainer, or by memory
Estimates are sums of published formulas; benchmarks/published.py compares them with published runs."""


class Partition(NamedTuple):
    """One layout of a world, and the policies that go with it; the size of an axis is an attribute too, such as ``tp``."""

    axes: Axes
    job: Job  # with nothing open
    reasons: tuple[str, ...] = ()  # why it is ruled out: by sizes, by its trainer, or by the memory
    memory: Memory | None = None  # of the fullest rank; None where a size is missing or rules it out
    seconds: Mapping[str, float] = {}  # of a step, by what they go to, with a memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.axes, name)

    @property
    def fits(self) -> bool:
        """Whether nothing rules it out."""
        return not self.reasons

    @property
    def words(self) -> str:
        """The sizes above 1, as a spec."""
        return ",".join(f"{axis}={size}" for axis, size in self.axes._asdict().items() if size > 1) or "dp=1"

    @property
    def policies(self) -> str:
        """What was searched, in words."""
        job = self.job
        return f"micro-batch {job.micro_batch}, stage {job.stage}, checkpointing {job.checkpointing}"

    @property
    def call(self) -> str:
        """The call that makes the mesh, to copy."""
        axes, data = self.axes, f"dp={self.axes.dp}"
        if axes.dp_replicate > 1:
            data = f"dp_replicate={axes.dp_replicate}, dp_shard={axes.dp // axes.dp_replicate}"
        call = f"mesh = init_mesh(pp={axes.pp}, {data}, cp={axes.cp}, tp={axes.tp})"
        if self.job.model.experts:
            call += f'; mesh.add_view("expert", pp={axes.pp}, edp={axes.edp}, ep={axes.ep}, etp={axes.etp})'
        return call

    @property
    def settings(self) -> list[str]:
        """What to write for each policy: micro-batch, ZeRO's stage, checkpointing."""
        return settings_of(self.job, self.axes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole job in a second; 0 if sizes are not known."""
        return self.job.global_batch * self.job.seq / sum(self.seconds.values()) if self.seconds else 0.0


def list_partitions(
    world_size: int, job: Job | None = None, *, margin: float = MARGIN, dp_replicate: int | None = None
) -> tuple[Partition, ...]:
    """List every tp x cp x pp x dp that makes up a world, with experts every ep inside it, and for each the best policies.

    Where the job leaves them open, micro-batches of 1, 2 and 4, ZeRO's stages 1 to 3, each checkpointing, and several sizes of
    ``dp_replicate`` are tried; what fits and is fastest is kept, or what needs the least memory.

    Args:
        world_size: how many ranks there are.
        job: the model and how it is trained; without its sizes nothing is estimated, and sizes alone rule out.
        margin: the part of the hardware's memory that stays free.
        dp_replicate: how many copies of a sharded model dp has (HSDP); by default the best.
    """
    job = job or Job()
    problems = job.problems()
    if world_size < 1:
        problems.append(f"world_size is {world_size}; it is an int of at least 1")
    if not 0 <= margin < 1:
        problems.append(f"margin is {margin}; it is the part of the memory that stays free, such as 0.08")
    if problems:
        raise LayoutError(*problems)
    job = replace(job, hardware=job.hardware.fit_domain(world_size))
    jobs, limit = list(_jobs(job)), job.hardware.memory * (1 - margin)
    return tuple(_best_of(axes, jobs, limit, dp_replicate) for axes in _all_axes(world_size, job))


def _jobs(job: Job) -> Iterator[list[Job]]:
    """Yield for each micro-batch the job with every other policy that it leaves open; without sizes there is nothing to compare by."""
    if job.missing:
        yield [job]
        return
    stages = _STAGES if job.stage is None else (job.stage,)
    checkpointing = _CHECKPOINTING if job.checkpointing is None else (job.checkpointing,)
    for micro_batch in _MICRO_BATCHES if job.micro_batch is None else (job.micro_batch,):
        policies = product((micro_batch,), checkpointing, stages)
        yield [
            replace(job, micro_batch=mb, checkpointing=again, stage=stage) for mb, again, stage in policies
        ]


def _best_of(axes: Axes, jobs: list[list[Job]], limit: float, dp_replicate: int | None) -> Partition:
    """Return a layout with the policies under which it is fastest, or else those that come nearest to fitting."""
    candidates = list[Partition]()
    for copies in [dp_replicate] if dp_replicate else _replicas(axes, jobs[0][0]):
        copied = axes._replace(dp_replicate=copies)
        for policies in jobs:
            reasons, lowest = tuple(incompatibilities(policies[0], copied)), inf
            if reasons or policies[0].missing:
                candidates.append(Partition(copied, policies[0], reasons))
                continue
            for job in policies:
                if (job.stage or 0) >= lowest:  # slower than what fits already, with less checkpointing
                    continue
                memory, seconds, reasons = estimate_memory(job, copied), dict[str, float](), ()
                if memory.total <= limit:
                    lowest, seconds = job.stage or 0, estimate_step(job, copied)
                else:
                    needs = f"needs {memory.total / 1e9:.1f} GB of {limit / 1e9:.1f}"
                    reasons = (f"{needs} at stage {job.stage}",)
                candidates.append(Partition(copied, job, reasons, memory, seconds))
    best = max(candidates, key=_worth)
    return best if best.memory is None else best._replace(seconds=estimate_step(best.job, best.axes))


def _worth(one: Partition) -> tuple[bool, float]:
    return one.fits, one.tokens_per_second if one.fits else -sum(one.memory or (inf,))


def _replicas(axes: Axes, job: Job) -> list[int]:
    """Return 1, and the largest dp_replicate whose shards fill whole domains of fast links."""
    if job.missing or axes.world <= job.hardware.domain:
        return [1]
    stage = axes.world // axes.pp
    divide = (copies for copies in _divisors(axes.dp)[1:] if axes.edp % copies == 0)
    return [1, *[copies for copies in divide if stage // copies % job.hardware.domain == 0][-_REPLICAS:]]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _all_axes(world_size: int, job: Job) -> Iterator[Axes]:
    for tp in _divisors(world_size):
        for cp in _divisors(world_size // tp):
            left = world_size // tp // cp
            for pp in _divisors(left):
                for ep in _divisors(world_size // pp) if job.model.experts else [1]:
                    for etp in sorted({1, tp}) if job.model.experts else [1]:
                        if world_size // pp % (ep * etp) == 0:
                            yield Axes(tp, cp, pp, left // pp, ep=ep, etp=etp)


def incompatibilities(job: Job, axes: Axes) -> Iterator[str]:
    """Yield a sentence for each size of a job that does not go with an axis, and for what a trainer refuses."""
    model, (tp, cp, pp, dp, copies, ep, etp) = job.model, axes
    network = model.ffn if model.dense_layers or not model.experts else 0
    for what, count, axis, size in (
        ("heads", model.heads, "tp", tp),
        ("hidden features", model.hidden, "tp", tp),
        ("features of the feed-forward network", network, "tp", tp),
        ("vocabulary entries", model.vocab, "tp", tp),
        ("experts", model.experts, "ep", ep),
        ("features of an expert", model.expert_ffn or model.inner, "etp", etp),
    ):
        if count % size:
            yield f"{count} {what} do not divide by {axis}={size}"
    # Each rank takes a chunk from either end of a sequence, so that causal attention is balanced.
    if cp > 1 and job.seq % (2 * cp):
        yield f"{job.seq} tokens of a sequence do not divide by 2 x cp={cp}"
    kv_heads = 0 if model.kv_rank else model.kv_heads
    if kv_heads % tp and not shared_heads(model.heads or kv_heads, kv_heads, tp):
        yield f"{kv_heads} key and value heads can neither be divided nor shared by tp={tp}"
    stages = pp * job.stages_per_rank
    if 0 < model.layers < stages:
        yield f"{model.layers} layers cannot fill {stages} stages"
    if dp % copies or axes.edp % copies:
        yield f"dp={dp} does not divide by dp_replicate={copies}"
    count = job.micro_batches(dp)
    if job.global_batch and not count:
        yield f"a global batch of {job.global_batch} does not divide by dp={dp} x micro-batches of {job.micro_batch}"
    elif job.is_torch and 0 < count < pp:
        yield f"{count} micro-batches are fewer than the {pp} stages, which torch's 1F1B refuses"
    elif job.stages_per_rank > 1 and count % pp and not job.is_torch:
        yield f"{count} micro-batches do not divide by pp={pp}, as Megatron's interleaved schedule needs"


def best_partitions(partitions: Iterable[Partition], count: int) -> tuple[Partition, ...]:
    """Return the partitions that fit with the most tokens in a second, the best first; a LayoutError if sizes are not known."""
    fitting = [one for one in partitions if one.fits]
    if fitting and fitting[0].job.missing:
        raise LayoutError(f"a ranking needs {', '.join(fitting[0].job.missing)}; give them too")
    return tuple(sorted(fitting, key=lambda one: -one.tokens_per_second)[:count])


def find_partition(partitions: Sequence[Partition], sizes: Mapping[str, int]) -> Partition:
    """Return the partition with these sizes; other axes have size 1, dp is whatever is left. A LayoutError if there is none."""
    wanted = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, **sizes}
    for one in partitions:
        if wanted.items() <= one.axes._asdict().items():
            return one
    given = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise LayoutError(f"{given} is none of these partitions; name tp, cp, pp, dp, with experts ep and etp")


def explain(first: Partition, second: Partition) -> str:
    """Return which of two partitions is faster, and the seconds and the gigabytes that differ, the largest difference first."""
    one, other = sorted((first, second), key=lambda each: -each.tokens_per_second)
    sizes = list[dict[str, float]]()
    for each in (one, other):
        if each.memory is None:
            why = "; ".join(each.reasons) or f"the seconds of a step need {', '.join(each.job.missing)}"
            raise LayoutError(f"{each.words} has no step to explain: {why}")
        sizes.append({part: size / 1e9 for part, size in each.memory._asdict().items()})
    ours, theirs = (sum(each.seconds.values()) for each in (one, other))
    needed, needs = (sum(each.values()) for each in sizes)
    words = f"{one.words} ({one.policies}) is faster than {other.words} ({other.policies})"
    lines = [f"{words}: {ours:.3g} s a step against {theirs:.3g} s, {1 - ours / theirs:.1%} less"]
    lines += _differences(one.seconds, other.seconds, "s")
    lines.append(f"it needs {needed:.3g} GB a GPU against {needs:.3g} GB")
    lines += _differences(sizes[0], sizes[1], "GB")
    lines += [f"{each.words} is ruled out: {each.reasons[0]}" for each in (one, other) if each.reasons]
    return "\n".join(lines)


def _differences(ours: Mapping[str, float], theirs: Mapping[str, float], unit: str) -> list[str]:
    lines = []
    for part in {**ours, **theirs}:
        own, other = ours.get(part, 0.0), theirs.get(part, 0.0)
        if abs(own - other) >= _LEAST * sum(ours.values()):
            lines.append((-abs(own - other), f"  {part}: {own:.3g} {unit} against {other:.3g} {unit}"))
    return [line for _, line in sorted(lines)]


def _configure(parser: ArgumentParser) -> None:
    """Declare the flags of ``namedmesh partitions``: a flag for each size of the model, and for each knob of the job."""
    parser.formatter_class, parser.epilog = RawDescriptionHelpFormatter, _WORDS
    parser.add_argument("--world-size", type=int, metavar="N", required=True, help="how many ranks there are")
    text = "Hugging Face's config.json of the model, or its directory; flags override it"
    parser.add_argument("--config", metavar="FILE", help=text)
    titles = {Model: "the model", Job: "how it is trained; the best is searched where nothing is said"}
    for kind, title in titles.items():
        group = parser.add_argument_group(title)
        for one in list_options(kind):
            allowed, how = one.metadata["choices"], dict[str, Any](type=int, metavar="N")
            if isinstance(one.default, bool):
                how = {"action": BooleanOptionalAction}
            elif allowed:
                how = {"type": type(allowed[0]), "choices": allowed}
            group.add_argument(f"--{one.name.replace('_', '-')}", help=one.metadata["text"], **how)
    group = parser.add_argument_group("on what, and what is shown")
    text = f"{', '.join(CARDS)}, or a file.json with the fields of a card (default: %(default)s)"
    group.add_argument("--hardware", default="h100", metavar="NAME", help=text)
    for flag, read, default, text in (
        ("--dp-replicate", positive_int, None, "copies of a sharded model: HSDP (default: the best of some)"),
        ("--memory", float, None, "GB of a GPU, if not the hardware's"),
        ("--margin", float, MARGIN, "the part of the memory that stays free (default: %(default)s)"),
        ("--best", positive_int, None, "only the N that fit and have the most tokens a second"),
    ):
        group.add_argument(flag, type=read, default=default, metavar="N", help=text)
    text = "why one of two layouts, such as tp=8,dp=4, is faster: the seconds and gigabytes that differ (default: the first two)"
    group.add_argument("--explain", nargs="*", metavar="SIZES", help=text)


def _run(arguments: Namespace) -> int:
    """Print the partitions that the arguments ask for; the status is 3 if nothing fits."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    model, notes = read_config(arguments.config) if arguments.config else (Model(), [])
    model = replace(model, **{one.name: given[one.name] for one in list_options(Model) if one.name in given})
    hardware = load_hardware(arguments.hardware)
    if arguments.memory:
        hardware = replace(hardware, memory=arguments.memory * 1e9)
    job = Job(
        model, hardware, **{one.name: given[one.name] for one in list_options(Job) if one.name in given}
    )
    margin, copies = arguments.margin, arguments.dp_replicate
    partitions = list_partitions(arguments.world_size, job, margin=margin, dp_replicate=copies)
    fitting = sum(one.fits for one in partitions)
    head = f"{count_of(len(partitions), 'layout')} of {arguments.world_size} ranks, {fitting} of them fit"
    if not job.missing:
        limit = f"{hardware.memory * (1 - margin) / 1e9:.4g} GB of {hardware.name}"
        head += f" {limit} ({margin:.0%} of it stay free)"
    parts = ["\n".join([head, *(f"{arguments.config}: {note}" for note in notes)])]
    listed: Sequence[Partition] = partitions
    if not fitting:
        parts.append("nothing fits; the nearest, with the policies that need the least memory:")
        listed = sorted(partitions, key=_worth, reverse=True)[: arguments.best or _NEAREST]
    elif arguments.best:
        listed = best_partitions(partitions, arguments.best)
    parts.append(_table(listed))
    ranked = not job.missing or arguments.explain == []
    best = best_partitions(partitions, 2) if fitting and ranked else ()
    two = [find_partition(partitions, parse_spec(text)[1]) for text in arguments.explain or ()]
    if arguments.explain and len(two) != 2:  # noqa: PLR2004  two are compared
        raise UsageError(f"--explain was given {arguments.explain}; give two layouts, or none")
    if two or (arguments.explain == [] and best[1:]):
        parts.append(explain(*(two or best)))
    if best:
        lines = [f"The fastest, with {best[0].policies}:", best[0].call, *best[0].settings]
        parts += ["\n  ".join(lines), assumptions_of(best[0].job)]
    sys.stdout.write("\n\n".join(parts) + "\n")
    return 0 if fitting else EXIT_MISMATCH


def _table(partitions: Sequence[Partition]) -> str:
    """Write a row for each partition, without columns that have nothing in any of them."""
    rows = []
    for one in partitions:
        row: dict[str, Any] = dict(zip(Axes._fields, one.axes, strict=True))
        if one.dp_replicate == 1:
            del row["dp_replicate"]
        if not one.job.model.experts:
            del row["ep"], row["etp"]
        if one.memory is not None:
            row |= {"mb": one.job.micro_batch, "stage": one.job.stage, "again": one.job.checkpointing}
            row |= {"GB": round(one.memory.total / 1e9, 1), "tokens/s": round(one.tokens_per_second)}
            whole, most = sum(one.seconds.values()), list(one.seconds.items())[:4]
            row["time goes to"] = ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in most)
        rows.append(row | {"ruled out": "; ".join(one.reasons)})
    columns = [name for name in _COLUMNS if any(row.get(name, "") != "" for row in rows)]
    return format_table(columns, [[row.get(name, "") for name in columns] for row in rows])


_SUMMARY = "every layout of a world, with the policies under which it is fastest; the exit status is 3 if nothing fits"
COMMANDS = {"partitions": (_SUMMARY, _configure, _run)}
