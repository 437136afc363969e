"""GPUs and the links between them: the cards of ``cards.json``, each number with its source, or a file of the user."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

from namedmesh.errors import did_you_mean
from namedmesh.plan.spec import UsageError, read_json, size_problems


@dataclass(frozen=True, eq=False)  # by identity: it holds dicts
class Hardware:
    """One GPU, its node and its links. Bandwidths are bytes a second in one direction.

    ``matmul`` is 0.85 of what the best shape reaches, as ordinary shapes reach 80 to 90 % of it (github.com/stas00/ml-engineering,
    compute/accelerator); ``memory_fraction`` and ``nic_fraction`` are those of Calculon (Isaev et al., SC 2023, systems/*.json).

    Args:
        name: its name.
        peak: operations a second by precision, dense.
        matmul: the fraction of the peak that large matrix products reach, by precision.
        attention: the fraction of the bf16 peak that causal attention reaches, forward and backward.
        memory: bytes of a GPU, by its data sheet.
        memory_bandwidth: bytes that it reads or writes in a second.
        memory_fraction: the fraction of it that elementwise kernels reach.
        gpus_per_node: GPUs in a node; its NICs are theirs together.
        domain: consecutive ranks that fast links (NVLink, Infinity Fabric) join.
        domain_bandwidth: what one GPU sends by them.
        domain_fraction: the fraction of it that collectives reach.
        nics_per_node: NICs of a node.
        nic_bandwidth: what one of them sends.
        nic_fraction: the fraction of it that collectives reach.
        sources: where each number comes from, by the names of its fields.
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

    def matmul_rate(self, precision: str) -> float:
        """Return the operations of matrix products in a second."""
        return self.peak[precision] * self.matmul[precision]

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

    def with_node(self, gpus: int) -> Hardware:
        """Return the same GPUs in nodes of another size, with as many NICs for each; fast links join a node at least."""
        problems = size_problems({"gpus_per_node": gpus})
        if problems:
            raise UsageError(*problems)
        domain = gpus if self.domain == self.gpus_per_node else max(gpus, self.domain)
        nics = self.nics_per_node * gpus / self.gpus_per_node
        return replace(self, gpus_per_node=gpus, domain=domain, nics_per_node=nics)

    def filled(self, world_size: int) -> Hardware:
        """Return the hardware as a job fills it: as many whole nodes of each domain as divide the world.

        Example:
            >>> load_hardware("gb200-nvl72").filled(2048).domain, load_hardware("h100").filled(6).domain
            (64, 6)
        """
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

        Example:
            >>> h100 = load_hardware("h100")
            >>> [round(h100.bandwidth(size, stride) / 1e9) for size, stride in ((8, 1), (64, 1), (64, 4), (8, 8))]
            [369, 360, 90, 45]
        """
        members = self.members(size, stride)
        if members == size:
            return self.domain_rate
        return min(self.domain_rate, members * self.nic_rate)


@cache
def _cards() -> dict[str, Hardware]:
    return {
        name: Hardware(**card)
        for name, card in read_json(str(Path(__file__).with_name("cards.json"))).items()
    }


def hardware_names() -> list[str]:
    """Return the names of the cards."""
    return sorted(_cards())


def load_hardware(name: str) -> Hardware:
    """Return a card by its name, or read one from a JSON file with the fields of :class:`Hardware`.

    Raises:
        UsageError: there is no such name or file, or a field is missing, unknown or no number above 0.

    Example:
        >>> load_hardware("h200").memory / 1e9
        141.0
        >>> load_hardware("h1000")
        Traceback (most recent call last):
        namedmesh.plan.spec.UsageError: hardware 'h1000' is not one of a100, b200, gb200-nvl72, h100, h200, mi300x, nor a file that ends in .json; did you mean 'h100'?
    """
    if name.endswith(".json"):
        return Hardware(**_checked(name, read_json(name)))
    if name not in _cards():
        raise UsageError(
            f"hardware {name!r} is not one of {', '.join(hardware_names())}, nor a file that ends in .json"
            f"{did_you_mean(name, hardware_names())}"
        )
    return _cards()[name]


def _checked(path: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a card; a UsageError with a sentence for each that is missing or unknown."""
    names = [one.name for one in fields(Hardware)]
    problems = [f"{name!r} is missing" for name in names if name not in data and name != "sources"]
    problems += [f"{name!r} is not a field{did_you_mean(name, names)}" for name in data if name not in names]
    if problems:
        raise UsageError(*(f"{path}: {problem}" for problem in problems))
    return data
