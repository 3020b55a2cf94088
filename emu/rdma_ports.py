"""Ports of this machine's RDMA devices that can carry verbs to other hosts: active RoCE ports with an IPv4 address."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSFS = Path("/sys/class/infiniband")
_MAPPED, _NO_ADDRESS = "0000:0000:0000:0000:0000:ffff:", "ffff:0000:0000"


@dataclass(frozen=True, slots=True)
class Port:
    """One port, and the GID by which others reach it.

    Attributes:
        device: the RDMA device's name.
        number: of the port, from 1.
        gid_index: of the RoCE v2 GID that maps the IPv4 address. Index 0 is link-local, and of RoCE v1 on many
            adapters: connections by it time out.
        address: the IPv4 address.
    """

    device: str
    number: int
    gid_index: int
    address: str


def usable_ports(sysfs: Path = SYSFS) -> tuple[list[Port], str]:
    """The usable ports, and, when there are none, why not.

    Args:
        sysfs: the kernel's folder of RDMA devices.
    """
    found: list[Port] = []
    lacking: list[str] = []
    for ports in sorted(sysfs.glob("*/ports/*"), key=lambda p: (p.parts[-3], int(p.name))):
        name = f"{ports.parts[-3]} port {ports.name}"
        state = _read(f"{ports}/state")
        layer = _read(f"{ports}/link_layer")
        gids = _ipv4_gids(ports)
        if "ACTIVE" not in state:
            lacking.append(f"{name} is not active ({state or 'no state'})")
        elif layer != "Ethernet":
            lacking.append(f"{name} is of link layer {layer or 'unknown'}, not RoCE")
        elif not gids:
            lacking.append(f"{name} has no RoCE v2 GID of an IPv4 address")
        found += [
            Port(ports.parts[-3], int(ports.name), index, address)
            for index, address in gids
            if "ACTIVE" in state and layer == "Ethernet"
        ]
    return found, "" if found else "; ".join(lacking) or "no RDMA device on this machine"


def choose_port(ports: Sequence[Port], address: str) -> Port:
    """The port of that IPv4 address, else the first: the way that the control channel took leads to the peer."""
    return next((port for port in ports if port.address == address), ports[0])


def _ipv4_gids(port: Path) -> list[tuple[int, str]]:
    """(index, IPv4 address) of the RoCE v2 GIDs; tables have up to a thousand entries, most of them empty."""
    found = []
    for name in os.listdir(port / "gids"):  # noqa: PTH208 - a thousand paths would be slow
        gid = _read(f"{port}/gids/{name}")
        if not gid.startswith(_MAPPED) or gid.endswith(_NO_ADDRESS):
            continue
        if _read(f"{port}/gid_attrs/types/{name}") == "RoCE v2":
            found.append((int(name), str(ipaddress.IPv6Address(gid).ipv4_mapped)))
    return sorted(found)


def _read(path: str) -> str:
    """A file's text; "" for an empty entry of a table, which cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 256).decode().strip()
        finally:
            os.close(fd)
    except OSError:
        return ""
