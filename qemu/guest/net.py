"""The guest's network: its private interface by rtnetlink (pyroute2), and a soft-RoCE device on it."""

import importlib
import json
import os
import sys
import types

import rdma_link

RXE = "rxe0"
STATE = "/run/emu/network.json"  # what setup() found
PACKAGES = (
    "/run/emu/packages"  # a file that names the directory where the host's Python has pyroute2
)


def report():
    """What setup() returned; empty before it."""
    try:
        with open(STATE) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def environment():
    """What programs get: the RDMA device and the index of the GID to use."""
    found = report()
    if "gid_index" not in found:
        return {}
    return {"EMU_RDMA_DEVICE": found["rdma_device"], "EMU_RDMA_GID_INDEX": str(found["gid_index"])}


def setup(mac, address, prefix_bits, mtu, peers, rxe):
    """Bring the interface of that MAC up with an IPv4 address, a name for each host, and, if asked, soft-RoCE on it.

    Returns:
        interface, RDMA device, and the index and text of the GID to use (RoCE v2 of the IPv4 address).
    """
    with _rtnetlink() as netlink:
        found = netlink.link_lookup(address=mac)
        if not found:
            raise OSError(19, f"no interface of address {mac}")
        netlink.link("set", index=found[0], mtu=mtu, state="up")
        netlink.addr("replace", index=found[0], address=address, prefixlen=prefix_bits)
        interface = netlink.link("get", index=found[0])[0].get("ifname")
    _name_hosts(peers)
    found = {"interface": interface, **(_soft_roce(interface, address) if rxe else {})}
    with open(STATE, "w") as file:
        json.dump(found, file)
    return found


def _soft_roce(interface, address):
    if not os.path.exists(f"{rdma_link.INFINIBAND}/{RXE}"):
        rdma_link.send(rdma_link.new_link(RXE, interface), f"rxe on {interface}")
    index = rdma_link.wait_for_gid(RXE, address)
    return {"rdma_device": RXE, "gid_index": index, "gid": rdma_link.gid_of(address)}


def _rtnetlink():
    """pyroute2's client of rtnetlink.

    The package's own __init__ imports all that it has (a SQL database, netfilter, wireless, ...), four times what we
    need, which is seconds in a guest. So the package is made here without it, and the one module imported from it.
    """
    with open(PACKAGES) as file:
        directory = file.read()
    package = types.ModuleType("pyroute2")
    package.__path__ = [f"{directory}/pyroute2"]
    sys.path.append(directory)
    sys.modules.setdefault("pyroute2", package)
    return importlib.import_module("pyroute2.iproute.linux").IPRoute()


def _name_hosts(peers):
    with open("/etc/hosts", "w") as file:
        file.write("127.0.0.1 localhost\n")
        file.writelines(f"{address} {name}\n" for name, address in peers.items())
