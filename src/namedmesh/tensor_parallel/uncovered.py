"""Trainable parameters between sharded layers that no style covers: their gradients would be parts, silently.

Between a column layer and the row layer that takes its features each rank works on its own part of them. A
parameter that takes part there has a different gradient on every rank, of which the sum is the right one. The
plan says where such sections begin and end, but not what a forward does: the rest is read off names and sizes.
A layer with as many features as go into the section, or come out of it, is taken to stand outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
)

from namedmesh.errors import listing
from namedmesh.tensor_parallel.attention_heads import called_attention, heads_around, sharded_features
from namedmesh.tensor_parallel.kv_heads import names_keys_or_values
from namedmesh.tensor_parallel.local import KeepWhole, LocalParameters
from namedmesh.tensor_parallel.placements import parameter_placements
from namedmesh.tensor_parallel.plan_entry import Entry
from namedmesh.tensor_parallel.shared_input import SharedInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

_GATHERING = (SharedInput, PrepareModuleInput, PrepareModuleInputOutput)
_ON_SHARDS = (
    "trainable and in no style, where the plan gives each rank its shard of the sequence: each rank would have another "
    "gradient; give its module LocalParameters() if the ranks use it on their shards, KeepWhole() if they all use it "
    "on the whole sequence, or freeze it"
)
_ACTIVATION = ("act", "elu", "silu", "swish", "glu")


@dataclass
class Section:
    """A module in which column layers feed row layers.

    Args:
        fqn: the module's name.
        inside: its submodules by fully qualified name, without those of smaller sections inside.
        columns: the column layers, by name.
        rows: the row layers, by name.
    """

    fqn: str
    inside: dict[str, nn.Module]
    columns: dict[str, nn.Linear] = field(default_factory=dict)
    rows: dict[str, nn.Linear] = field(default_factory=dict)

    @property
    def attention(self) -> bool:
        """Whether it is called attention."""
        return called_attention(self.fqn, self.inside[self.fqn])

    def sizes_outside(self, styled: set[str]) -> set[int]:
        """Return the numbers of features that go in and come out, through linears without a style, too."""
        sizes = {linear.in_features for linear in self.columns.values()}
        sizes |= {linear.out_features for linear in self.rows.values()}
        for _ in range(2):  # one linear may feed another
            for fqn, module in self.inside.items():
                if isinstance(module, nn.Linear) and fqn not in styled and self.leads_in(fqn, module, sizes):
                    sizes |= {module.in_features, module.out_features}
        return sizes

    def leads_in(self, fqn: str, linear: nn.Linear, sizes: set[int]) -> bool:
        """Return whether a linear without a style is taken to make the input of a column layer."""
        if self.attention and (names_keys_or_values(fqn) or linear.in_features == linear.out_features):
            return False
        return linear.out_features in sizes


def sections(model: nn.Module, entries: list[Entry]) -> list[Section]:
    """Return the smallest modules that have a row layer and, to make its input, a column layer."""
    modules = dict(model.named_modules())
    layers = [(e, e.module) for e in entries if isinstance(e.module, nn.Linear) and sharded_features(e)]
    columns = {e.fqn: linear for e, linear in layers if isinstance(e.style, ColwiseParallel)}
    rows = {e.fqn: linear for e, linear in layers if isinstance(e.style, RowwiseParallel)}
    owners: dict[str, dict[str, nn.Linear]] = {}
    for fqn, linear in rows.items():
        owner = fqn
        while owner and not any(_is_inside(column, owner) for column in columns):
            owner = owner.rpartition(".")[0]
        if any(_is_inside(column, owner) for column in columns):
            owners.setdefault(_attention_around(owner, modules, columns), {})[fqn] = linear
    found = []
    for owner, own_rows in owners.items():
        smaller = [other for other in owners if other != owner and _is_inside(other, owner)]

        def is_own(fqn: str, owner: str = owner, smaller: list[str] = smaller) -> bool:
            return _is_inside(fqn, owner) and not any(_is_inside(fqn, other) for other in smaller)

        inside = {fqn: module for fqn, module in modules.items() if is_own(fqn)}
        own_columns = {fqn: linear for fqn, linear in columns.items() if is_own(fqn)}
        if own_columns:
            found.append(Section(owner, inside, own_columns, own_rows))
    return found


def _attention_around(owner: str, modules: dict[str, nn.Module], columns: Iterable[str]) -> str:
    """Return the attention with other column layers that a module is the output projection of; or else the module."""
    tokens = owner.split(".")
    for depth in range(len(tokens) - 1, 0, -1):
        around = ".".join(tokens[:depth])
        others = any(_is_inside(fqn, around) and not _is_inside(fqn, owner) for fqn in columns)
        if called_attention(around, modules[around]) and others:
            return around
    return owner


def _is_inside(fqn: str, owner: str) -> bool:
    return not owner or fqn == owner or fqn.startswith(f"{owner}.")


def sequence_parallel(entries: list[Entry]) -> list[Entry]:
    """Return the entries at whose input or output each rank has its shard of the sequence."""
    return [entry for entry in entries if any(map(_shards_the_sequence, _outer_layouts(entry.style)))]


def _outer_layouts(style: ParallelStyle) -> tuple[Placement | None, ...]:
    """Return how a style's module gets its inputs or hands out its output, on the side of the rest of the model."""
    if isinstance(style, PrepareModuleInputOutput):
        style = style.prepare_module_input
    if isinstance(style, ColwiseParallel | PrepareModuleInput):
        return tuple(style.input_layouts or ())
    if isinstance(style, RowwiseParallel):
        return tuple(style.output_layouts)
    return (style.input_layouts,) if isinstance(style, SharedInput) else ()


def _shards_the_sequence(layout: Placement | None) -> bool:
    """Return whether a layout shards another dim than the last of activations (batch, sequence, features)."""
    return isinstance(layout, Shard) and layout.dim not in {-1, 2}


def _on_shards(model: nn.Module, entries: list[Entry]) -> Iterator[str]:
    """Return trainable parameters in no style, of modules that may work on this rank's shard of the sequence only."""
    sharded = sequence_parallel(entries)
    if not sharded:
        return
    owner, *others = (entry.fqn.rpartition(".")[0] for entry in sharded)
    while not all(_is_inside(other, owner) for other in others):
        owner = owner.rpartition(".")[0]
    styles = {entry.fqn: entry.style for entry in entries}
    elsewhere = [fqn for fqn, style in styles.items() if isinstance(style, _GATHERING)]
    for fqn, module in model.named_modules():
        named = any(_is_inside(other, fqn) for other in styles if other != fqn)
        # Layers in a list of which the plan names nothing may have a plan of their own.
        if not named and isinstance(styles.get(fqn, module), KeepWhole | nn.ModuleList | nn.ModuleDict):
            elsewhere.append(fqn)
    for fqn, module in model.named_modules():
        style = styles.get(fqn)
        covered = {} if style is None else parameter_placements(style, module)
        inside = _is_inside(fqn, owner) and not any(_is_inside(fqn, other) for other in elsewhere)
        if inside and covered is not None and not isinstance(style, KeepWhole):
            for name, parameter in module.named_parameters(recurse=False):
                left = parameter.requires_grad and not isinstance(parameter, DTensor)
                if left and name not in covered:
                    yield f"{fqn}.{name}".lstrip(".")


def cover(model: nn.Module, entries: list[Entry]) -> tuple[list[Entry], list[str]]:
    """Return what a plan leaves out between sharded layers.

    Returns:
        The entries that can only be meant: a norm over the features of one head inside of attention, and an
        activation with one number for all features, whose gradients have to be summed; and a number for each
        head, which is sharded. And a sentence for everything else.
    """
    styled = {entry.fqn: entry.style for entry in entries}
    # What is left out of a plan that shards the sequence still gets shards of it.
    leave_out = "a plan without sequence parallelism" if sequence_parallel(entries) else "the plan"
    meant: list[Entry] = []
    places: dict[str, list[str]] = {}
    for section in sections(model, entries):
        sizes = section.sizes_outside(set(styled))
        for fqn, module, names in _left_out(model, section, styled, sizes):
            style = None if fqn in styled else _meant(section, fqn, module, names, sizes)
            if style is not None:
                meant.append(Entry(fqn, module, style, "(between sharded layers)"))
            else:
                reason = _reason(section, fqn, module, styled.get(fqn), leave_out)
                places.setdefault(reason, []).extend(f"{fqn}.{name}".lstrip(".") for name in names)
        for fqn, reason in _whole_heads(section, styled, leave_out):
            places.setdefault(reason, []).append(fqn)
    told = {name for names in places.values() for name in names}
    left = [name for name in _on_shards(model, entries + meant) if name not in told]
    if left:
        places[_ON_SHARDS] = left
    return meant, [f"{listing(names, 4)}: {reason}" for reason, names in places.items()]


def _whole_heads(
    section: Section, styled: dict[str, ParallelStyle], leave_out: str
) -> Iterator[tuple[str, str]]:
    """Yield what makes, or takes, the features of all heads in attention whose ranks have some of them."""
    if not section.attention:
        return
    heads = heads_around(section.inside, next(iter(section.columns)))
    counts = {count[1] for count in (heads.queries, heads.keys) if count} if heads else set()
    # A linear behind it takes them for features, as that of an adapter does.
    counts -= {m.in_features for m in section.inside.values() if isinstance(m, nn.Linear)}
    main = max(linear.out_features for linear in section.rows.values())
    remedy = f"where each rank has its heads; leave its attention out of {leave_out}"
    for fqn, row in section.rows.items():
        if row.out_features in counts and row.out_features != main:
            yield fqn, f"makes a number for each head, those of all heads on every rank, {remedy}"
    for fqn, module in section.inside.items():
        shapes = {tuple(parameter.shape) for parameter in module.parameters(recurse=False)}
        beside = [linear for name, linear in section.columns.items() if _initial(name) == _initial(fqn)]
        is_norm = fqn not in styled and "norm" in type(module).__name__.lower()
        if is_norm and len(beside) == 1 and shapes == {(beside[0].out_features,)}:
            yield fqn, f"normalizes over the features of all heads, {remedy}"


def _initial(fqn: str) -> str:
    """Return what the name of a module of queries, keys or values begins with; empty for others."""
    name = fqn.rpartition(".")[2].removeprefix("w")
    return name[0] if name.startswith(("q", "k", "v")) else f"other {fqn}"


def _left_out(
    model: nn.Module, section: Section, styled: dict[str, ParallelStyle], sizes: set[int]
) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield the modules with trainable parameters of their own that may take part on every rank, and the names."""
    order = list(section.inside)
    first, last = min(map(order.index, section.columns)), max(map(order.index, section.rows))
    # Where other layers have no style either, the section is more than its columns and rows.
    loose = not section.attention and any(
        _has_features(module) and fqn not in styled for fqn, module in section.inside.items()
    )
    networks = _networks_outside(section, styled, sizes)
    # A frozen layer of features hands on a gradient of which each rank has another part.
    trains = any(parameter.requires_grad for parameter in model.parameters())
    for position, (fqn, module) in enumerate(section.inside.items()):
        style = styled.get(fqn)
        if any(_is_inside(fqn, network) for network in networks):
            continue
        if isinstance(style, KeepWhole) or (
            _has_features(module) and _stands_outside(section, fqn, module, sizes)
        ):
            continue
        if loose and not first < position < last and not _is_activation(fqn, module):
            continue
        gathered = fqn in styled and _hands_out_all(style)
        covered = {} if style is None or gathered else parameter_placements(style, module)
        if covered is None or (style is not None and not gathered and _has_features(module)):
            continue  # only the style knows, or the module is one that a style works on as a whole
        names = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if (parameter.requires_grad or (trains and _has_features(module)))
            and name not in covered
            and (_has_features(module) or (parameter.shape[-1] if parameter.ndim else 1) not in sizes)
        ]
        if names:
            yield fqn, module, names


def _networks_outside(section: Section, styled: dict[str, ParallelStyle], sizes: set[int]) -> list[str]:
    """Return modules of several linears without a style that read the input, such as the indexer of sparse attention."""
    found: list[str] = []
    for fqn in section.inside:
        if fqn == section.fqn or any(_is_inside(other, fqn) for other in styled):
            continue
        linears = [
            m for name, m in section.inside.items() if _is_inside(name, fqn) and isinstance(m, nn.Linear)
        ]
        reads = sizes | {linear.out_features for linear in linears}
        if len(linears) > 1 and all(linear.in_features in reads for linear in linears):
            found.append(fqn)
    return found


def _has_features(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "out_channels")


def _stands_outside(section: Section, fqn: str, module: nn.Module, sizes: set[int]) -> bool:
    if isinstance(module, nn.Linear):
        return section.leads_in(fqn, module, sizes)
    return (module.embedding_dim if isinstance(module, nn.Embedding) else module.out_channels) in sizes


def _hands_out_all(style: ParallelStyle | None) -> bool:
    """Return whether a column style gathers its features, so that every rank gets all of them."""
    return isinstance(style, ColwiseParallel) and isinstance(style.output_layouts[0], Replicate)


def _meant(
    section: Section, fqn: str, module: nn.Module, names: list[str], sizes: set[int]
) -> LocalParameters | None:
    """Return the style that a module without one can only be meant to have, if there is one."""
    own = dict(module.named_parameters(recurse=False))
    shapes = {tuple(parameter.shape) for parameter in own.values()}
    heads = heads_around(section.inside, f"{fqn}.")
    width, count = (heads.head_dim, heads.queries and heads.queries[1]) if heads else (None, None)
    if len(own) != len(names):
        return None
    if _is_activation(fqn, module):
        one = fqn != section.fqn and all(parameter.numel() == 1 for parameter in own.values())
        return LocalParameters() if one else None
    if not section.attention or _is_listed(section, fqn) or width in sizes:
        return None
    if fqn != section.fqn and "norm" in _called(fqn, module):
        return LocalParameters() if shapes == {(width,)} else None
    if shapes == {(count,)} and count != width and count not in sizes:
        return LocalParameters(dict.fromkeys(own, Shard(0)))
    return None


def _is_listed(section: Section, fqn: str) -> bool:
    """Return whether a module is in a list, such as a norm for each head, of which ranks would take those of others."""
    return any(token.isdigit() for token in fqn.removeprefix(section.fqn).split("."))


def _is_activation(fqn: str, module: nn.Module) -> bool:
    return not _has_features(module) and any(word in _called(fqn, module) for word in _ACTIVATION)


def _called(fqn: str, module: nn.Module) -> str:
    return f"{fqn.rpartition('.')[2]} {type(module).__name__}".lower()


def _reason(
    section: Section, fqn: str, module: nn.Module, style: ParallelStyle | None, leave_out: str
) -> str:
    columns, rows = (starred(names) for names in (section.columns, section.rows))
    between = f"between {listing(columns, 3)}, whose features are sharded, and {listing(rows, 3)}"
    if _hands_out_all(style):
        text = f"every rank gets all the features of this column layer {between}, and uses other ones of them"
    else:
        text = f"trainable and in no style, but {between}: each rank would have another gradient"
    if isinstance(module, nn.Linear) and names_keys_or_values(fqn):
        return f"{text}; give its module KeyValueParallel()"
    if _hands_out_all(style):
        return f"{text}; let each rank have its features, with output_layouts=Shard(-1)"
    if _is_listed(section, fqn):
        return f"{text}; leave these layers out of {leave_out}"
    if isinstance(module, nn.Linear):
        return (
            f"{text}; give it ColwiseParallel() if the ranks use their own features of it, SumTailGradient(width) if "
            f"they all use its last features, and column layers the rest, or KeepWhole() if none of its features meets "
            f"those of a rank"
        )
    return (
        f"{text}; give its module LocalParameters() if the ranks use it on their own features, KeepWhole() if "
        f"they all use it on the same values, or freeze it"
    )


def starred(names: dict[str, nn.Linear]) -> list[str]:
    """Return names with the layer numbers as wildcards, each once."""
    generic = (".".join("*" if token.isdigit() else token for token in fqn.split(".")) for fqn in names)
    return list(dict.fromkeys(generic))
