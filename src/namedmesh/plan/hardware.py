"""GPUs and the links between them, read from one JSON file each: the shipped ones, or a file of the user."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.plan.spec import UsageError, size_problems

_FOLDER = Path(__file__).with_name("gpus")
_BY_PRECISION = ("peak", "matmul")
_SIZES = ("gpus_per_node", "domain")
_FRACTIONS = ("attention", "memory_fraction", "domain_fraction", "nic_fraction")


@dataclass(frozen=True, eq=False)  # by identity: it holds dicts
class Hardware:
    """One GPU, its node and its links. Bandwidths are bytes a second in one direction.

    Args:
        name: its name.
        peak: operations a second by precision, dense.
        matmul: the fraction of the peak that large matrix products reach, by precision.
        attention: the fraction of the bf16 peak that fused attention reaches, forward and backward.
        memory: bytes that a job may use; the data sheet's GB, as 10^9 bytes, leaves 5 GiB of a card of 80 GiB to CUDA and NCCL.
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
        """Return the operations of matrix products in a second.

        Raises:
            LayoutError: the hardware has no figure for the precision.
        """
        if precision not in self.peak:
            raise LayoutError(f"{self.name} has no {precision}; it has {', '.join(self.peak)}")
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
        """Return the same GPUs in nodes of another size, with as many NICs for each; fast links join a node at least.

        Raises:
            LayoutError: a node of less than one GPU.
        """
        problems = size_problems({"gpus_per_node": gpus})
        if problems:
            raise LayoutError(*problems)
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

        Args:
            size: ranks of the group.
            stride: how far apart they are.

        Example:
            >>> h100 = load_hardware("h100")
            >>> [round(h100.bandwidth(size, stride) / 1e9) for size, stride in ((8, 1), (64, 1), (64, 4), (8, 8))]
            [369, 360, 90, 45]
        """
        members = self.members(size, stride)
        if members == size:
            return self.domain_rate
        return min(self.domain_rate, members * self.nic_rate)


def hardware_names() -> list[str]:
    """Return the names of the shipped files."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_hardware(name: str) -> Hardware:
    """Load hardware by its name, or from a JSON file with the fields of :class:`Hardware`.

    Raises:
        UsageError: there is no such name or file, or a field is missing, unknown or no number above 0.

    Example:
        >>> load_hardware("h200").memory / 1e9
        141.0
        >>> load_hardware("h1000")
        Traceback (most recent call last):
        namedmesh.plan.spec.UsageError: hardware 'h1000' is not one of a100, b200, gb200-nvl72, h100, h200, mi300x, nor a file that ends in .json; did you mean 'h100'?
    """
    if not name.endswith(".json"):
        names = hardware_names()
        if name not in names:
            raise UsageError(
                f"hardware {name!r} is not one of {', '.join(names)}, nor a file that ends in .json{did_you_mean(name, names)}"
            )
        return _shipped(name)
    data = read_json(name)
    problems = _problems(data)
    if problems:
        raise UsageError(*(f"{name}: {problem}" for problem in problems))
    return Hardware(**data)


@cache  # so that jobs on the same hardware are equal
def _shipped(name: str) -> Hardware:
    return Hardware(**json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a file; a UsageError if it cannot be read, or holds none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path!r} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path!r} holds no JSON object, but a {type(data).__name__}")
    return data


def _problems(data: dict[str, Any]) -> list[str]:
    """Return a sentence for each field that is missing, unknown or wrong."""
    names = [one.name for one in fields(Hardware)]
    problems = [f"{name!r} is missing" for name in names if name not in data and name != "sources"]
    problems += [f"{name!r} is not a field{did_you_mean(name, names)}" for name in data if name not in names]
    if problems:
        return problems
    numbers = {name: data[name] for name in names if name not in {"name", "sources", *_BY_PRECISION}}
    for name in _BY_PRECISION:
        if not isinstance(data[name], dict) or "bf16" not in data[name]:
            return [f"{name!r} is {data[name]!r}; it is an object with a number for bf16 at least"]
        numbers |= {f"{name}.{precision}": number for precision, number in data[name].items()}
    if set(data["peak"]) != set(data["matmul"]):
        problems.append("'peak' and 'matmul' name different precisions; give both the same")
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number <= 0:
            problems.append(f"{name!r} is {number!r}; it is a number above 0")
        elif (name in _FRACTIONS or name.startswith("matmul.")) and number > 1:
            problems.append(f"{name!r} is {number}; it is a fraction, of 1 at most")
        elif name in _SIZES and number != int(number):
            problems.append(f"{name!r} is {number}; it is a whole number")
    return problems
