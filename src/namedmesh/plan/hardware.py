"""GPUs and the links between them: the cards of ``cards.json``, each number with its source, or a file of the user."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

from namedmesh.errors import UsageError, did_you_mean


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file; a UsageError if it cannot be read."""
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


@dataclass(frozen=True, eq=False)  # by identity: it holds dicts
class Hardware:
    """One GPU, its node and its links. Bandwidths are bytes a second in one direction, fractions those that kernels reach.

    ``matmul`` is 0.85 of what the best shape reaches, as ordinary shapes reach 80 to 90 % of it (github.com/stas00/ml-engineering,
    compute/accelerator); ``memory_fraction`` and ``nic_fraction`` are those of Calculon (Isaev et al., SC 2023, systems/*.json).
    """

    name: str
    peak: dict[str, float]  # operations a second by precision, dense
    matmul: dict[str, float]  # the fraction of it that large matrix products reach
    attention: float  # the fraction of the bf16 peak that causal attention reaches, forward and backward
    memory: float  # bytes of a GPU, by its data sheet
    memory_bandwidth: float
    memory_fraction: float  # that elementwise kernels reach
    gpus_per_node: int  # which share its NICs
    domain: int  # consecutive ranks that fast links (NVLink, Infinity Fabric) join
    domain_bandwidth: float  # what one GPU sends by them
    domain_fraction: float  # that collectives reach
    nics_per_node: float
    nic_bandwidth: float  # of one of them
    nic_fraction: float
    sources: dict[str, str] = field(default_factory=dict)  # by the names of fields

    @property
    def memory_rate(self) -> float:
        """The bytes that elementwise kernels read or write in a second."""
        return self.memory_bandwidth * self.memory_fraction

    @property
    def domain_rate(self) -> float:
        """The bytes that collectives move over fast links in a second."""
        return self.domain_bandwidth * self.domain_fraction

    @property
    def nic_rate(self) -> float:
        """The bytes that a GPU's share of its node's NICs moves in a second."""
        return self.nic_bandwidth * self.nic_fraction * self.nics_per_node / self.gpus_per_node

    def filled(self, world_size: int) -> Hardware:
        """Return the hardware as a job fills it: as many whole nodes of each domain as divide the world."""
        used = range(self.domain, 0, -self.gpus_per_node) if world_size > self.domain else (world_size,)
        domain = next((ranks for ranks in used if world_size % ranks == 0), self.domain)
        return self if domain == self.domain else replace(self, domain=domain)

    def members(self, size: int, stride: int) -> int:
        """Return how many ranks of a group, ``stride`` apart, lie in one domain; the fewest, where groups lie differently."""
        return gcd(size, max(1, self.domain // stride))

    def bandwidth(self, size: int, stride: int) -> float:
        """Return the bytes a second that a collective moves over each link of a group (nccl-tests' bus bandwidth).

        A group that leaves its domain goes in and out through the NICs of all its members there: eight members have
        eight NICs, one member has its own.
        """
        members = self.members(size, stride)
        return self.domain_rate if members == size else min(self.domain_rate, members * self.nic_rate)


CARDS = {name: Hardware(**card) for name, card in read_json(Path(__file__).with_name("cards.json")).items()}


def load_hardware(name: str) -> Hardware:
    """Return a card by its name, or read one from a JSON file with the fields of :class:`Hardware`."""
    if name.endswith(".json"):
        try:
            return Hardware(**read_json(name))
        except TypeError as error:  # which names the field that is missing or unknown
            raise UsageError(f"{name}: {error}") from None
    if name not in CARDS:
        near = did_you_mean(name, CARDS)
        raise UsageError(f"hardware {name!r} is not one of {', '.join(CARDS)}, nor a file.json{near}")
    return CARDS[name]
