"""Soft-RoCE of this machine: the netlink messages, and a testbed that makes and removes a device, by a fake kernel.

test_guests.py does the same in a guest, by a real one.
"""

from __future__ import annotations

import shutil
import socket
import struct
from typing import TYPE_CHECKING

import pytest

import emu
from emu import rdma_link
from emu.errors import HostError, TestbedError, UserError
from emu.provision import native_rdma
from emu.provision.state import StateDirectory

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from conftest import Home


def test_the_message_is_that_of_rdma_link_add() -> None:
    """By strace of `rdma link add rxe0 type rxe netdev eth0` (iproute2): rdma_netlink.h has the numbers."""
    message = rdma_link.new_link("rxe0", "eth0")
    length, kind, flags, _, _ = struct.unpack_from("IHHII", message)
    assert (length, kind, flags) == (len(message), 5 << 10 | 3, 1 | 4)
    assert message[16:] == (
        b"\x09\0\x02\0rxe0\0\0\0\0"  # RDMA_NLDEV_ATTR_DEV_NAME
        b"\x08\0\x41\0rxe\0"  # RDMA_NLDEV_ATTR_LINK_TYPE
        b"\x09\0\x33\0eth0\0\0\0\0"  # RDMA_NLDEV_ATTR_NDEV_NAME
    )


def test_the_gid_is_the_one_that_maps_the_address_of_version_2_on_an_active_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_link, "INFINIBAND", str(tmp_path))
    port = tmp_path / "rxe0" / "ports" / "1"
    table = {
        0: ("fe80:0000:0000:0000:5054:00ff:fee5:0001", "RoCE v2"),
        1: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "IB/RoCE v1"),
        2: ("0000:0000:0000:0000:0000:ffff:0a4d:0002", "RoCE v2"),
        3: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2"),
    }
    for index, (gid, kind) in table.items():
        write(port / "gids" / str(index), gid)
        write(port / "gid_attrs" / "types" / str(index), kind)
    write(port / "gids" / "4", "0000:0000:0000:0000:0000:0000:0000:0000")  # its type is unreadable
    write(port / "state", "4: ACTIVE")
    assert rdma_link.find_gid("rxe0", "10.77.0.1") == 3
    assert rdma_link.find_gid("rxe0", "10.77.0.9") is None
    assert rdma_link.find_gid("rxe1", "10.77.0.1") is None
    write(port / "state", "1: DOWN")
    assert rdma_link.find_gid("rxe0", "10.77.0.1") is None


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


class Kernel:
    """Takes the messages that rdma_link sends, and shows devices in a directory as sysfs does."""

    def __init__(self, infiniband: Path) -> None:
        self.infiniband = infiniband
        self.devices = {"mlx5_0": 0}
        self.interfaces: dict[str, str] = {}
        self.refusal = 0
        write(infiniband / "mlx5_0" / "node_type", "1: CA")

    def socket(self, *arguments: int) -> Kernel:
        assert arguments == (socket.AF_NETLINK, socket.SOCK_RAW, 20)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def settimeout(self, _: float) -> None:
        pass

    def sendto(self, message: bytes, _: tuple[int, int]) -> None:
        length, kind, flags = struct.unpack_from("IHH", message)
        assert length == len(message)
        found = dict(rdma_link._attributes(message[16:]))
        self.answer = self.acknowledge(self.refusal)
        if kind == 5 << 10 | 1:
            assert flags == 1 | 0x300
            self.answer = b"".join(self.describe(name) for name in self.devices)
            self.answer += struct.pack("IHHIIi", 20, 3, 2, 1, 0, 0)
        elif kind == 5 << 10 | 3 and not self.refusal:
            interface = found[51].rstrip(b"\0").decode()
            if interface in self.interfaces.values():
                self.answer = self.acknowledge(17)
            else:
                self.make(found[2].rstrip(b"\0").decode(), interface)
        elif kind == 5 << 10 | 4:
            index = struct.unpack("I", found[1])[0]
            (name,) = [name for name, number in self.devices.items() if number == index]
            del self.devices[name], self.interfaces[name]
            shutil.rmtree(self.infiniband / name)

    def recv(self, _: int) -> bytes:
        return self.answer

    @staticmethod
    def acknowledge(error: int) -> bytes:
        return struct.pack("IHHIIi", 20, 2, 0, 1, 0, -error)

    def describe(self, name: str) -> bytes:
        text = name.encode() + b"\0"
        body = struct.pack("HHI", 8, 1, self.devices[name])
        body += struct.pack("HH", 4 + len(text), 2) + text + bytes(-len(text) % 4)
        return struct.pack("IHHII", 16 + len(body), 5 << 10 | 1, 2, 1, 0) + body

    def make(self, name: str, interface: str) -> None:
        self.devices[name] = max(self.devices.values()) + 1
        self.interfaces[name] = interface
        port = self.infiniband / name / "ports" / "1"
        write(port / "state", "4: ACTIVE")
        write(port / "gids" / "1", "0000:0000:0000:0000:0000:ffff:7f00:0001")
        write(port / "gid_attrs" / "types" / "1", "RoCE v2")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(tmp_path / "infiniband")
    monkeypatch.setattr(rdma_link, "INFINIBAND", str(made.infiniband))
    monkeypatch.setattr(rdma_link.socket, "socket", made.socket)
    monkeypatch.setattr(native_rdma, "why_not", lambda: None)
    monkeypatch.setattr(native_rdma, "_load_module", lambda: None)
    return made


def local(home: Home, name: str = "n", rdma: str = "native") -> object:
    return emu.testbed(
        1, driver="local", device_size="1M", rdma=rdma, name=name, directory=home.run
    )


def test_a_testbed_makes_its_device_tells_its_programs_and_removes_it(
    home: Home, kernel: Kernel
) -> None:
    with local(home) as bed:
        assert kernel.interfaces == {"emu-n": "lo"}
        assert bed.node_socket is None
        env = bed.env("host0")
        assert (env["EMU_RDMA_DEVICE"], env["EMU_RDMA_GID_INDEX"]) == ("emu-n", "1")
        with (
            pytest.raises(TestbedError, match="lo carries a soft-RoCE device already"),
            local(home, "m"),
        ):
            pytest.fail("two on one interface")
        assert list(kernel.devices) == ["mlx5_0", "emu-n"]
    assert list(kernel.devices) == ["mlx5_0"]
    assert StateDirectory().names() == []


def test_a_device_of_that_name_that_is_not_ours_stays(home: Home, kernel: Kernel) -> None:
    kernel.make("emu-n", "eth0")
    with pytest.raises(TestbedError, match="there is an RDMA device emu-n already"), local(home):
        pytest.fail("made")
    assert "emu-n" in kernel.devices
    assert StateDirectory().names() == []
    assert list(home.run.iterdir()) == []


def test_a_refusal_of_the_kernel_is_told_and_leaves_nothing(home: Home, kernel: Kernel) -> None:
    kernel.refusal = 1
    with pytest.raises(TestbedError, match=r"soft-RoCE device emu-n.*not permitted"), local(home):
        pytest.fail("made")
    assert list(home.run.iterdir()) == []


def test_a_machine_without_the_module_refuses_before_anything_is_made(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = HostError("this kernel has no rdma_rxe", remedy="use --driver qemu")
    monkeypatch.setattr(native_rdma, "why_not", lambda: words)
    with pytest.raises(HostError, match=r"no rdma_rxe .*--driver qemu"), local(home):
        pytest.fail("made")
    assert list(home.run.iterdir()) == []


def test_without_root_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_rdma.os, "geteuid", lambda: 1000)
    found = native_rdma.why_not()
    assert found is not None
    assert "needs root" in found.message
    assert "--driver qemu" in found.remedy


def test_guests_have_no_native_soft_roce() -> None:
    from emu.provision.guest_plan import refuse_what_qemu_lacks
    from emu.provision.spec import Flags, make_spec

    with pytest.raises(UserError, match="--rdma rxe"):
        refuse_what_qemu_lacks(make_spec(Flags(cxl_devices=1, rdma="native")))
