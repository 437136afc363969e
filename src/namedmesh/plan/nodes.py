"""Nodes and NVLink domains: which groups stay inside one, which cross, and an order under which fewer cross."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from namedmesh.dialects import DENSE, EXPERT, DialectLayout, layouts_for
from namedmesh.errors import count_of

_BANDWIDTH_BOUND = ("tp", "etp", "ep")
# What an order string names: where tp and dp stand decides where etp and edp do.
_TOKENS = ("tp", "cp", "ep", "dp", "dp_shard", "dp_replicate", "pp")


@dataclass(frozen=True)
class Placement:
    """The nodes and NVLink domains of the groups over one axis.

    Args:
        axis: the axis.
        view: the layout that has it.
        size: the number of ranks in a group.
        groups: how many groups there are.
        across_nodes: how many of them have ranks on several nodes.
        across_domains: how many have ranks in several NVLink domains; None if no domain was named.
    """

    axis: str
    view: str
    size: int
    groups: int
    across_nodes: int
    across_domains: int | None = None

    @property
    def words(self) -> str:
        """The same in words.

        Example:
            >>> Placement("tp", "dense", 4, 8, 0).words, Placement("tp", "dense", 3, 8, 3).words
            ('inside a node', '3 of 8 groups cross nodes')
        """
        if self.size == 1:
            return "one rank"
        if not self.across_nodes:
            return "inside a node"
        text = _crossed(self.across_nodes, self.groups, "nodes")
        if self.across_domains is None:
            return text
        if not self.across_domains:
            return f"{text}, inside an NVLink domain"
        return f"{text}, {_crossed(self.across_domains, self.groups, 'NVLink domains')}"


def _crossed(crossed: int, groups: int, what: str) -> str:
    return f"crosses {what}" if crossed == groups else f"{crossed} of {groups} groups cross {what}"


def crossing_groups(size: int, stride: int, world_size: int, block: int) -> int:
    """Count the groups of ``size`` ranks, ``stride`` apart, that have ranks in several blocks of consecutive ranks.

    By arithmetic: the cost is that of the block, such as the GPUs of a node, not of the world.
    """
    span, period = (size - 1) * stride, size * stride
    if block % period == 0 or size == 1 or block >= world_size:
        return 0
    # A group that starts t or more into its block reaches into the next one.
    t = max(0, block - span)
    repeat = block // gcd(period, block)
    starts = world_size // period
    whole, rest = divmod(starts, repeat)

    def late(below: int) -> int:
        """Count the numbers below a bound that are t or more, modulo block."""
        return below // block * (block - t) + max(0, below % block - t)

    def in_periods(count: int) -> int:
        return sum(late(index * period + stride) - late(index * period) for index in range(count))

    return whole * in_periods(repeat) + in_periods(rest)


def placements(
    arrangement: DialectLayout, gpus_per_node: int, nvlink_domain: int | None = None
) -> tuple[Placement, ...]:
    """Place the groups over each axis on nodes, slowest axis first, the experts' own axes at the end."""
    placed = []
    for view, layout in ((DENSE, arrangement.dense), (EXPERT, arrangement.expert)):
        if layout is None:
            continue
        for axis, stride in zip(layout, layout.strides, strict=True):
            if view == EXPERT and axis in arrangement.dense:
                continue
            size, domains = layout[axis], None
            nodes = crossing_groups(size, stride, layout.world_size, gpus_per_node)
            if nvlink_domain is not None:
                domains = crossing_groups(size, stride, layout.world_size, nvlink_domain)
            placed.append(Placement(axis, view, size, layout.count(axis), nodes, domains))
    return tuple(placed)


def bandwidth_bound(placed: tuple[Placement, ...]) -> list[Placement]:
    """Return the axes that exchange activations inside every layer, and do not stay inside the fast links."""
    return [
        placement
        for placement in placed
        if placement.axis in _BANDWIDTH_BOUND
        and (placement.across_nodes if placement.across_domains is None else placement.across_domains)
    ]


def better_order(arrangement: DialectLayout, block: int) -> str | None:
    """Return the order of the axes, fastest first, with tp and ep in front, if that keeps them inside a block."""
    dialect, dense, expert = arrangement.dialect, arrangement.dense, arrangement.expert
    sizes = dict(dense.items())
    tokens = [axis for axis in reversed(dense.axes) if axis in _TOKENS]
    if not dialect.orderable or len(tokens) < len(dense):
        return None
    places = {"tp": 0, "ep": 1}
    if expert is not None:
        sizes = dict(expert.items()) | sizes
        fastest_data = min(tokens.index(axis) for axis in tokens if axis.startswith("dp"))
        tokens.insert(fastest_data, "ep")
        places["pp"] = 3  # in the middle, the experts' pipelines would be other ranks
    order = "-".join(sorted(tokens, key=lambda token: places.get(token, 2)))
    made = layouts_for(dialect, sizes, world_size=dense.world_size, order=order)
    if bandwidth_bound(placements(made, block)):
        return None
    return order if expert is not None else made.dense.order


def node_warnings(
    arrangement: DialectLayout,
    placed: tuple[Placement, ...],
    gpus_per_node: int | None,
    nvlink_domain: int | None,
) -> list[str]:
    """Return a sentence for a last node that is not full, and one for the axes that should stay inside the fast links."""
    warnings = []
    world = arrangement.dense.world_size
    if gpus_per_node is not None and world > gpus_per_node and world % gpus_per_node:
        warnings.append(
            f"{world} ranks do not fill nodes of {gpus_per_node}: the last has {world % gpus_per_node}"
        )
    far = bandwidth_bound(placed)
    block = nvlink_domain or gpus_per_node
    if not far or block is None:
        return warnings
    where = f"{'a node' if nvlink_domain is None else 'an NVLink domain'} of {count_of(block, 'GPU')}"
    names = " and ".join(f"{place.axis}={place.size}" for place in far)
    verb, them = ("leaves", "it") if len(far) == 1 else ("leave", "them")
    order = better_order(arrangement, block)
    if order is not None:
        remedy = f"; the order {order!r} (fastest first, as --order takes it) keeps {them} inside"
    else:
        dialect = arrangement.dialect
        orders = "in any order" if dialect.orderable else f"in the order of {dialect.name}"
        inner = "etp x ep" if any(place.view == EXPERT for place in far) else "tp"
        remedy = f", {orders}; choose {inner} so that it divides {block}"
    return [*warnings, f"{names} {verb} {where}{remedy}"]
