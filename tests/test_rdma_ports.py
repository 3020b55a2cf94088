"""Which port and GID is taken: tables as they were met in public bug reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from emu.rdma_ports import Port, choose_port, usable_ports

if TYPE_CHECKING:
    from pathlib import Path

LOCAL = ("fe80:0000:0000:0000:5054:00ff:fee5:0001", "RoCE v2")
LOCAL_V1 = (LOCAL[0], "IB/RoCE v1")
IPV4 = ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2")
IPV4_V1 = (IPV4[0], "IB/RoCE v1")
OTHER = ("0000:0000:0000:0000:0000:ffff:c0a8:0107", "RoCE v2")
IPV6 = ("2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2")
EMPTY = ("0000:0000:0000:0000:0000:0000:0000:0000", None)
UNSET = ("0000:0000:0000:0000:0000:ffff:0000:0000", "RoCE v2")


def make_port(
    sysfs: Path, gids: list, *, device="rxe0", state="4: ACTIVE", layer="Ethernet"
) -> None:
    port = sysfs / device / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(layer + "\n")
    for index, (gid, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(gid + "\n")
        if kind is not None:  # the kernel refuses to read the type of an empty entry
            (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


@pytest.mark.parametrize(
    ("gids", "wanted"),
    [
        ([LOCAL, IPV4], [(1, "10.77.0.1")]),  # soft-RoCE
        ([LOCAL_V1, LOCAL, IPV4_V1, IPV4], [(3, "10.77.0.1")]),  # an adapter with both versions
        ([LOCAL, IPV6, EMPTY, EMPTY, OTHER], [(4, "192.168.1.7")]),  # a table with holes
        ([IPV4, OTHER], [(0, "10.77.0.1"), (1, "192.168.1.7")]),
        ([UNSET, IPV4], [(1, "10.77.0.1")]),
    ],
)
def test_the_ipv4_roce_v2_gid_is_taken(tmp_path: Path, gids: list, wanted: list) -> None:
    make_port(tmp_path, gids)
    ports, reason = usable_ports(tmp_path)
    assert [(port.gid_index, port.address) for port in ports] == wanted
    assert reason == ""


@pytest.mark.parametrize(
    ("gids", "changes", "words"),
    [
        ([LOCAL, IPV6], {}, "rxe0 port 1 has no RoCE v2 GID of an IPv4 address"),
        ([LOCAL, IPV4], {"state": "1: DOWN"}, "rxe0 port 1 is not active (1: DOWN)"),
        ([IPV4], {"layer": "InfiniBand"}, "rxe0 port 1 is of link layer InfiniBand, not RoCE"),
        ([IPV4_V1], {}, "rxe0 port 1 has no RoCE v2 GID of an IPv4 address"),
    ],
)
def test_why_there_is_none(tmp_path: Path, gids: list, changes: dict, words: str) -> None:
    make_port(tmp_path, gids, **changes)
    assert usable_ports(tmp_path) == ([], words)


def test_no_device_at_all(tmp_path: Path) -> None:
    assert usable_ports(tmp_path / "none") == ([], "no RDMA device on this machine")


def test_the_port_of_the_way_to_the_peer_comes_first(tmp_path: Path) -> None:
    make_port(tmp_path, [LOCAL, IPV4], device="mlx5_0")
    make_port(tmp_path, [OTHER], device="mlx5_1")
    ports, _ = usable_ports(tmp_path)
    assert choose_port(ports, "192.168.1.7") == Port("mlx5_1", 1, 0, "192.168.1.7")
    assert choose_port(ports, "203.0.113.1").device == "mlx5_0"
