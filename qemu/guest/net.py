"""The guest's network: the address of its private interface, and a soft-RoCE device on it, by ioctl and netlink."""

import fcntl
import os
import socket
import struct
import time

SIOCSIFADDR, SIOCSIFFLAGS, SIOCSIFNETMASK, SIOCSIFMTU = 0x8916, 0x8914, 0x891C, 0x8922
IFF_UP = 1
NETLINK_RDMA = 20
RDMA_NL_NLDEV = 5
NLDEV_CMD_NEWLINK = 3
NLM_F_REQUEST, NLM_F_ACK, NLMSG_ERROR = 1, 4, 2
ATTR_DEV_NAME, ATTR_NDEV_NAME, ATTR_LINK_TYPE = 2, 51, 65
RXE = "rxe0"


def setup(mac, address, netmask, mtu, peers, rxe):
    """Bring the interface of that MAC up with an IPv4 address, a name for each host, and, if asked, soft-RoCE on it.

    Returns:
        interface, RDMA device, and the index and text of the GID to use (RoCE v2 of the IPv4 address).
    """
    interface = _interface(mac)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = interface.encode().ljust(16, b"\0")
        fcntl.ioctl(sock, SIOCSIFMTU, name + struct.pack("i20x", mtu))
        for request, text in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, netmask)):
            packed = struct.pack("HH4s8x8x", socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(sock, request, name + packed)
        fcntl.ioctl(sock, SIOCSIFFLAGS, name + struct.pack("H22x", IFF_UP))
    _name_hosts(peers)
    if not rxe:
        return {"interface": interface}
    if not os.path.exists(f"/sys/class/infiniband/{RXE}"):
        _add_rxe(interface)
    index, gid = _gid(address)
    return {"interface": interface, "rdma_device": RXE, "gid_index": index, "gid": gid}


def _interface(mac):
    for name in os.listdir("/sys/class/net"):
        with open(f"/sys/class/net/{name}/address") as file:
            if file.read().strip() == mac:
                return name
    raise OSError(19, f"no interface of address {mac}")


def _name_hosts(peers):
    with open("/etc/hosts", "w") as file:
        file.write("127.0.0.1 localhost\n")
        file.writelines(f"{address} {name}\n" for name, address in peers.items())


def _attribute(kind, text):
    body = text.encode() + b"\0"
    return struct.pack("HH", 4 + len(body), kind) + body.ljust(-(-len(body) // 4) * 4, b"\0")


def _add_rxe(interface):
    """Make the soft-RoCE device: the message that `rdma link add rxe0 type rxe netdev X` sends."""
    attributes = (
        _attribute(ATTR_DEV_NAME, RXE)
        + _attribute(ATTR_LINK_TYPE, "rxe")
        + _attribute(ATTR_NDEV_NAME, interface)
    )
    kind = RDMA_NL_NLDEV << 10 | NLDEV_CMD_NEWLINK
    header = struct.pack("IHHII", 16 + len(attributes), kind, NLM_F_REQUEST | NLM_F_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as sock:
        sock.settimeout(20)
        sock.sendto(header + attributes, (0, 0))
        answer = sock.recv(4096)
    kind, error = struct.unpack_from("IHHIIi", answer)[1], struct.unpack_from("i", answer, 16)[0]
    if kind != NLMSG_ERROR or error:
        raise OSError(-error, os.strerror(-error), f"rxe on {interface}")


def _gid(address, timeout_s=20.0):
    """Index and text of the RoCE v2 GID that maps the IPv4 address; other GIDs do not reach other hosts."""
    port = f"/sys/class/infiniband/{RXE}/ports/1"
    octets = socket.inet_aton(address).hex()
    wanted = f"0000:0000:0000:0000:0000:ffff:{octets[:4]}:{octets[4:]}"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for index in sorted(map(int, os.listdir(f"{port}/gids"))):
            try:
                with (
                    open(f"{port}/gids/{index}") as gid,
                    open(f"{port}/gid_attrs/types/{index}") as kind,
                ):
                    if gid.read().strip() == wanted and "v2" in kind.read():
                        with open(f"{port}/state") as state:
                            if "ACTIVE" in state.read():
                                return index, wanted
            except OSError:  # an empty entry of the table
                continue
        time.sleep(0.05)
    raise OSError(19, f"no active RoCE v2 GID of {address}", RXE)
