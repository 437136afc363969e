"""Which host this process runs on, and whether gloo would tell the ranks of other hosts an address that they can reach."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_identity() -> str:
    """Return a text that is the same for processes that reach each other over the loopback interface, and no others."""
    words = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        # Containers and virtual machines may share a name; a network namespace has a loopback interface of its own.
        words += [_BOOT_ID.read_text(encoding="ascii").strip(), str(_NETWORK.readlink())]
    return " ".join(words)


def loopback_problem() -> str | None:
    """Return what is wrong if gloo takes a loopback address on this host; None if it takes another one.

    gloo binds to the interfaces in ``GLOO_SOCKET_IFNAME``, or else to the first address of the host's name.
    """
    name = socket.gethostname()
    if len(os.environ.get("GLOO_SOCKET_IFNAME", "")) > 1:  # torch takes no notice of a single letter
        return None
    address = _address_of(name)
    if address is not None and not ip_address(address.partition("%")[0]).is_loopback:
        return None
    if address is None:
        why = f"the host's name {name!r} does not resolve to an address of its own"
    else:
        why = f"the host's name {name!r} resolves to {address}"
    reached = _address_toward(os.environ.get("MASTER_ADDR", ""))
    which = f", here the one with the address {reached}" if reached else ""
    return (
        f"{why}, where ranks on other hosts cannot reach its gloo groups; set GLOO_SOCKET_IFNAME to the network interface "
        f"that joins the hosts{which}, or give the name that address in /etc/hosts"
    )


def gloo_address() -> str:
    """Return the network interfaces that gloo binds to on this host, or else the address."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or _address_of(socket.gethostname()) or "127.0.0.1"


def _address_of(name: str) -> str | None:
    """Return the first address of a name that this host can bind to, as gloo looks for it."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return None


def _address_toward(host: str) -> str | None:
    """Return the address of this host from which it reaches another one; nothing is sent."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host or None, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                found = str(probe.getsockname()[0])
                if not ip_address(found.partition("%")[0]).is_loopback:
                    return found
    return None
