"""Soft-RoCE devices by netlink, and the GID to use: what `rdma link add` does, without that program.

Only the standard library is imported: a guest's agent has a copy of this file.
"""

from __future__ import annotations

import os
import socket
import struct
import time

TYPE_CHECKING = False  # `typing` takes a while to import in a guest
if TYPE_CHECKING:
    from collections.abc import Iterator

NETLINK_RDMA = 20
RDMA_NL_NLDEV = 5
CMD_GET, CMD_NEWLINK, CMD_DELLINK = 1, 3, 4
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP, NLMSG_ERROR, NLMSG_DONE = 1, 4, 0x300, 2, 3
ATTR_DEV_INDEX, ATTR_DEV_NAME, ATTR_NDEV_NAME, ATTR_LINK_TYPE = 1, 2, 51, 65
"""rdma_netlink.h of the kernel."""
HEADER = "IHHII"
INFINIBAND = "/sys/class/infiniband"
TIMEOUT_S = 20.0


def new_link(name: str, interface: str) -> bytes:
    """The message that makes a soft-RoCE device: `rdma link add NAME type rxe netdev INTERFACE`."""
    return _message(
        CMD_NEWLINK,
        _text(ATTR_DEV_NAME, name)
        + _text(ATTR_LINK_TYPE, "rxe")
        + _text(ATTR_NDEV_NAME, interface),
    )


def delete_link(index: int) -> bytes:
    """The message that removes an RDMA device by its index."""
    return _message(CMD_DELLINK, struct.pack("HHI", 8, ATTR_DEV_INDEX, index))


def _message(command: int, attributes: bytes, flags: int = NLM_F_ACK) -> bytes:
    kind = RDMA_NL_NLDEV << 10 | command
    header = struct.pack(HEADER, 16 + len(attributes), kind, NLM_F_REQUEST | flags, 1, 0)
    return header + attributes


def _text(kind: int, text: str) -> bytes:
    body = text.encode() + b"\0"
    return struct.pack("HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


def send(message: bytes, what: str) -> None:
    """Send one message to the kernel and take its answer.

    Args:
        message: as new_link and delete_link make it.
        what: names the device in errors.

    Raises:
        OSError: the kernel refuses, with its errno and `what` as the file name.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.sendto(message, (0, 0))
        answer = sock.recv(4096)
    kind = struct.unpack_from(HEADER, answer)[1]
    error = struct.unpack_from("i", answer, 16)[0]
    if kind != NLMSG_ERROR or error:
        raise OSError(-error, os.strerror(-error), what)


def exists(name: str) -> bool:
    """Whether there is an RDMA device of that name."""
    return os.path.exists(f"{INFINIBAND}/{name}")


def device_index(name: str) -> int | None:
    """The kernel's index of an RDMA device; None when there is no such device, or no RDMA at all.

    Raises:
        OSError: the kernel refuses to list them.
    """
    if not exists(name):
        return None
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.sendto(_message(CMD_GET, b"", NLM_F_DUMP), (0, 0))
        while True:
            for kind, body in _messages(sock.recv(1 << 16)):
                if kind == NLMSG_DONE:
                    return None
                if kind == NLMSG_ERROR:
                    error = -struct.unpack_from("i", body)[0]
                    raise OSError(error, os.strerror(error), name)
                found = dict(_attributes(body))
                if found[ATTR_DEV_NAME] == name.encode() + b"\0":
                    index: int = struct.unpack("I", found[ATTR_DEV_INDEX])[0]
                    return index


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = struct.unpack_from("IH", data)
        yield kind, data[16:length]
        data = data[-(-length // 4) * 4 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = struct.unpack_from("HH", data)
        yield kind & 0x3FFF, data[4:length]
        data = data[-(-length // 4) * 4 :]


def gid_of(address: str) -> str:
    """The GID that maps an IPv4 address, as sysfs writes it."""
    octets = socket.inet_aton(address).hex()
    return f"0000:0000:0000:0000:0000:ffff:{octets[:4]}:{octets[4:]}"


def find_gid(device: str, address: str) -> int | None:
    """Index of the RoCE v2 GID of an IPv4 address on an active port; other GIDs do not reach other hosts.

    Args:
        device: the RDMA device; its port 1 is looked at.
        address: IPv4.
    """
    port = f"{INFINIBAND}/{device}/ports/1"
    try:
        if "ACTIVE" not in _read(f"{port}/state"):
            return None
        indices = sorted(map(int, os.listdir(f"{port}/gids")))
    except OSError:
        return None
    for index in indices:
        try:
            kind = _read(f"{port}/gid_attrs/types/{index}")
            if _read(f"{port}/gids/{index}") == gid_of(address) and kind == "RoCE v2":
                return index
        except OSError:  # an empty entry of the table
            continue
    return None


def wait_for_gid(device: str, address: str, timeout_s: float = TIMEOUT_S) -> int:
    """As find_gid, waiting for the port and its table.

    Raises:
        OSError: there is none in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        index = find_gid(device, address)
        if index is not None:
            return index
        time.sleep(0.05)
    raise OSError(19, f"no active RoCE v2 GID of {address}", device)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
