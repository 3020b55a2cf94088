"""Real verbs between a client and a memory node: which port, and what the two tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emu import _native
from emu.rdma_ports import choose_port, usable_ports

if TYPE_CHECKING:
    from typing import TypeAlias

Endpoint: TypeAlias = "tuple[int, int, int, list[int]]"
"""Queue pair number, first packet number, enum ibv_mtu, GID as 16 numbers."""


def open_device(address: str) -> _native.VerbsDevice:
    """The usable port of that IPv4 address, or the first usable one, opened by libibverbs.

    Raises:
        LookupError: there is none; says why.
        RuntimeError, OSError: libibverbs is missing or refuses.
    """
    ports, reason = usable_ports()
    if not ports:
        raise LookupError(reason)
    port = choose_port(ports, address)
    return _native.VerbsDevice(port.device, port.number, port.gid_index)


def endpoint_to_json(endpoint: Endpoint) -> dict[str, Any]:
    """As a message carries it."""
    number, psn, mtu, gid = endpoint
    return {"qp_number": number, "psn": psn, "mtu": mtu, "gid": bytes(gid).hex()}


def endpoint_from_json(data: dict[str, Any]) -> Endpoint:
    """Back from a message."""
    return data["qp_number"], data["psn"], data["mtu"], list(bytes.fromhex(data["gid"]))
