"""Two hosts on one machine: network namespaces with a link between them, and ranks forked into each.

The addresses are those of the namespaces, which nothing outside them can reach. Each host has a name of its own, and its
own /etc/hosts. Making them needs root and the command ``ip``; where that is missing the tests are skipped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
from ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

IP, TC = shutil.which("ip") or "", shutil.which("tc") or "tc"

LINK = "link0"
"""The name of the interface that joins the hosts, on both."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2


class Host(NamedTuple):
    """One host: its namespace, its name and its addresses on the link."""

    namespace: str
    name: str
    address: str
    address6: str


@dataclass
class Hosts:
    """Two hosts and the link between them."""

    pair: tuple[Host, Host]
    directory: Path

    def run(
        self,
        per_host: int,
        function: Callable[..., T],
        *args: Any,
        loopback_names: bool = False,
        interface: str | None = LINK,
        timeout: float = 60.0,
    ) -> list[T]:
        """Run ``function`` as :func:`ranks.run_ranks` does, on ranks of both hosts; rank 0 hosts the store.

        Args:
            per_host: the number of ranks on each host.
            function: what to run.
            *args: its arguments.
            loopback_names: whether each host's name resolves to a loopback address, as Debian sets it up.
            interface: the value of GLOO_SOCKET_IFNAME; None for none.
            timeout: in seconds.
        """

        def on_host(*args: Any) -> T:
            rank = int(os.environ["RANK"])
            self.enter(rank // per_host, loopback_names=loopback_names)
            self.set_variables(rank, 2 * per_host, per_host, interface=interface)
            return function(*args)

        return run_ranks(2 * per_host, on_host, *args, init=False, timeout=timeout)

    def run_worlds(
        self, worlds: Sequence[Callable[[], object]], *, interface: str | None = LINK, timeout: float = 60.0
    ) -> list[list[Any]]:
        """Run several worlds of two ranks at once, one rank on each host; returns the results of each world.

        Each function is called on both ranks of its world, with the variables that torchrun sets.
        """

        def in_world() -> Any:
            place = int(os.environ["RANK"])
            world, rank = divmod(place, 2)
            self.enter(rank)
            self.set_variables(rank, 2, 1, port=29500 + world, interface=interface)
            return worlds[world]()

        results = run_ranks(2 * len(worlds), in_world, init=False, timeout=timeout)
        return [results[2 * world : 2 * world + 2] for world in range(len(worlds))]

    def set_variables(
        self, rank: int, world_size: int, per_host: int, *, port: int = 29500, interface: str | None = LINK
    ) -> None:
        """Set the variables of torchrun, whose rank 0 hosts the store on the first host."""
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank % per_host),
            LOCAL_WORLD_SIZE=str(per_host),
            MASTER_ADDR=self.pair[0].address,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="False",
        )
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface

    def enter(self, number: int, *, loopback_names: bool = False) -> None:
        """Move this process to a host: its network, its name and its /etc/hosts."""
        host = self.pair[number]
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", host.namespace).open(encoding="ascii") as namespace:
            _succeeds(libc.setns(namespace.fileno(), _CLONE_NEWNET))
        _succeeds(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
        _succeeds(libc.sethostname(host.name.encode(), len(host.name)))
        names = self.directory / f"{host.name}-{os.getpid()}"  # another rank may be reading its own
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for each in self.pair:
            address = "127.0.1.1" if loopback_names and each is host else each.address
            lines += [f"{address} {each.name}", f"{each.address6} {each.name}6"]
        names.write_text("\n".join(lines) + "\n", encoding="ascii")
        _succeeds(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
        _succeeds(libc.mount(str(names).encode(), b"/etc/hosts", None, _MS_BIND, None))

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Cut the link between the hosts meanwhile."""
        _ip("-n", self.pair[0].namespace, "link", "set", LINK, "down")
        try:
            yield
        finally:
            for host in self.pair:  # an interface that was down has lost its second address
                _ip("-n", host.namespace, "link", "set", LINK, "up")
                _ip("-n", host.namespace, "addr", "replace", f"{host.address6}/64", "dev", LINK, "nodad")

    @contextmanager
    def slow(self, megabits: int) -> Iterator[None]:
        """Let no more than so many megabits a second through the link meanwhile."""
        shaped = [[TC, "-n", host.namespace, "qdisc", "{}", "dev", LINK, "root"] for host in self.pair]
        limits = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "500ms"]
        for command in shaped:
            done = subprocess.run(
                [word.format("add") for word in command] + limits, check=False, capture_output=True, text=True
            )
            if done.returncode:
                pytest.skip(f"the link cannot be shaped here: {done.stderr.strip()}")
        try:
            yield
        finally:
            for command in shaped:
                subprocess.run([word.format("del") for word in command], check=False, capture_output=True)


@contextmanager
def mounted(source: Path, target: Path) -> Iterator[None]:
    """Show a directory in the place of another meanwhile, to this process only; on a host that it has entered."""
    libc = ctypes.CDLL(None, use_errno=True)
    _succeeds(libc.mount(str(source).encode(), str(target).encode(), None, _MS_BIND, None))
    try:
        yield
    finally:
        _succeeds(libc.umount2(str(target).encode(), _MNT_DETACH))


def _succeeds(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)


def make(directory: Path) -> Iterator[Hosts]:
    """Make two hosts, and remove them in the end."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    if not IP:
        pytest.skip("needs the command ip, to make network namespaces")
    pair = tuple(
        Host(f"namedmesh-{os.getpid()}-{name}", f"host-{name}", f"10.0.0.{place}", f"fd00::{place}")
        for place, name in enumerate("ab", 1)
    )
    try:
        for host in pair:
            try:
                _ip("netns", "add", host.namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        first, second = pair
        _ip(
            "-n",
            first.namespace,
            "link",
            "add",
            LINK,
            "type",
            "veth",
            "peer",
            LINK,
            "netns",
            second.namespace,
        )
        for host in pair:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", LINK)
            _ip("-n", host.namespace, "addr", "add", f"{host.address6}/64", "dev", LINK, "nodad")
            _ip("-n", host.namespace, "link", "set", LINK, "up")
        yield Hosts((first, second), directory)
    finally:
        for host in pair:
            subprocess.run([IP, "netns", "delete", host.namespace], check=False, capture_output=True)
