"""GPUs, nodes and links; ``cards.json`` names a source for each number."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

from namedmesh._command_line import MOST_RANKS
from namedmesh._errors import UsageError, did_you_mean

_LARGEST_NUMBER = 1e30


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        UsageError: if the file cannot be read, or holds something else.
    """
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


# Compared by identity: its dicts cannot be hashed, and two cards are never equal.
@dataclass(frozen=True, eq=False)
class Hardware:
    """One GPU, its node and its links.

    Bandwidths are bytes per second in one direction. Fractions are the part of a data sheet's
    number that kernels or collectives reach. ``matmul`` is 0.85 of the best shape's fraction, as
    ordinary shapes reach 80 to 90 % of it (github.com/stas00/ml-engineering, compute/accelerator).
    ``memory_fraction`` and ``nic_fraction`` are Calculon's (Isaev et al., SC 2023, systems/*.json).

    Attributes:
        name: the name that is printed.
        peak: dense operations per second, by precision.
        matmul: the fraction of ``peak`` that large matrix products reach, by precision.
        attention: the fraction of the bf16 peak that causal attention reaches, forward and
            backward.
        memory: the bytes of a GPU's memory, by its data sheet.
        memory_bandwidth: the bandwidth of this memory.
        memory_fraction: the fraction of it that elementwise kernels reach.
        gpus_per_node: the number of GPUs that share the NICs of a node.
        domain: the number of consecutive ranks that fast links (NVLink, Infinity Fabric) connect.
        domain_bandwidth: the bandwidth at which one GPU sends over the fast links.
        domain_fraction: the fraction of it that collectives reach.
        nics_per_node: the number of NICs.
        nic_bandwidth: the bandwidth of one NIC.
        nic_fraction: the fraction of it that collectives reach.
        sources: the source of each number, by the names of attributes.
    """

    name: str
    peak: dict[str, float]
    matmul: dict[str, float]
    attention: float
    memory: float
    memory_bandwidth: float
    memory_fraction: float
    gpus_per_node: int
    domain: int
    domain_bandwidth: float
    domain_fraction: float
    nics_per_node: float
    nic_bandwidth: float
    nic_fraction: float
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def memory_rate(self) -> float:
        """The bytes per second that elementwise kernels read or write."""
        return self.memory_bandwidth * self.memory_fraction

    @property
    def domain_rate(self) -> float:
        """The bytes per second that collectives move over fast links."""
        return self.domain_bandwidth * self.domain_fraction

    @property
    def nic_rate(self) -> float:
        """The bytes per second that collectives move through one GPU's share of its node's NICs."""
        return self.nic_bandwidth * self.nic_fraction * self.nics_per_node / self.gpus_per_node

    def fit_domain(self, world_size: int) -> Hardware:
        """Return the hardware with the largest domains of whole nodes that divide the world.

        A job of 1024 ranks uses 64 of the 72 GPUs of each NVL72 domain.

        Args:
            world_size: the number of ranks of the job.
        """
        domain = self.domain
        if world_size <= self.domain:
            domain = world_size
        else:
            # A job takes whole nodes of each domain, and as many of each.
            for candidate in range(self.domain, 0, -self.gpus_per_node):
                if world_size % candidate == 0:
                    domain = candidate
                    break
        # Hardware is compared by identity: a job that fits already stays equal to itself.
        return self if domain == self.domain else replace(self, domain=domain)

    def members(self, size: int, stride: int) -> int:
        """Return the number of ranks of a group that share a domain; the least of all groups.

        Args:
            size: the number of ranks in the group.
            stride: the distance between neighboring ranks of the group.
        """
        # The ranks of a domain are consecutive, and `domain // stride` of them are in one group. If
        # that does not divide the group, its ranks are spread unevenly, differently in each group.
        return gcd(size, max(1, self.domain // stride))

    def bandwidth(self, size: int, stride: int) -> float:
        """Return the bus bandwidth of a group's collectives, in bytes per second (as nccl-tests).

        A group that leaves its domain uses the NICs of all of its members there: eight members have
        eight NICs, one member has one.

        Args:
            size: the number of ranks in the group.
            stride: the distance between neighboring ranks of the group.
        """
        members = self.members(size, stride)
        return self.domain_rate if members == size else min(self.domain_rate, members * self.nic_rate)


CARDS = {name: Hardware(**card) for name, card in read_json(Path(__file__).with_name("cards.json")).items()}
"""The hardware that is known by name."""


def _find_wrong_numbers(hardware: Hardware) -> list[str]:
    """Return a message for each attribute that is not a positive number, or has none for bf16."""
    problems = []
    for attribute in vars(hardware).keys() - {"name", "sources"}:
        value = getattr(hardware, attribute)
        numbers = [value]
        if attribute in {"peak", "matmul"}:
            numbers = list(value.values()) if isinstance(value, dict) and "bf16" in value else [None]
        is_count = attribute in {"gpus_per_node", "domain"}
        types = {int} if is_count else {int, float}
        most = MOST_RANKS if is_count else _LARGEST_NUMBER
        if not all(type(number) in types and 0 < number <= most for number in numbers):
            problems.append(f"{attribute} is {value!r}; see the fields of a card in cards.json")
    if not problems and set(hardware.peak) != set(hardware.matmul):
        problems.append("peak and matmul must have the same precisions")
    return sorted(problems)


def load_hardware(name: str) -> Hardware:
    """Return the hardware of a name, or read it from a file.

    Args:
        name: a name of ``CARDS``, or a path that ends in ``.json``, with the attributes of
            :class:`Hardware`.

    Raises:
        UsageError: if the name is not known, or the file cannot be read or lacks an attribute.
    """
    if name.endswith(".json"):
        try:
            hardware = Hardware(**read_json(name))
        except TypeError as error:  # which names the missing or unknown attribute
            raise UsageError(f"{name}: {error}") from None
        problems = _find_wrong_numbers(hardware)
        if problems:
            raise UsageError(*(f"{name}: {problem}" for problem in problems))
        return hardware
    if name not in CARDS:
        near = did_you_mean(name, CARDS)
        raise UsageError(f"hardware {name!r} is not one of {', '.join(CARDS)}, nor a file.json{near}")
    return CARDS[name]
