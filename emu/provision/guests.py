"""The QEMU command of a guest: a pure function of what the guest shall be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.guest.session import agent_socket
from emu.units import parse_size

if TYPE_CHECKING:
    from emu.provision.topology import Topology

SLOTS = 8
FIRST_BUS, BUSES_PER_BRIDGE = 32, 48
"""PCI bus numbers of the host bridges; they must not meet those of the first one's ports."""
NETWORK = "10.77.0"
PREFIX_BITS = 24
MTU = 9000
"""Of the guests' network: large enough for the 4096-byte path MTU of RoCE."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A guest's hardware beside its devices; from qemu/machines/NAME.toml.

    Attributes:
        memory: of the guest, for instance "1536M".
        cpus: their number.
        tcg_cpu, kvm_cpu: QEMU's -cpu for each accelerator.
        kernel_arguments: of the guest's kernel.
        agent_ports: sessions at a time.
    """

    memory: str
    cpus: int
    tcg_cpu: str
    kvm_cpu: str
    kernel_arguments: str
    agent_ports: int


@dataclass(frozen=True, slots=True)
class Backing:
    """One device's memory.

    Attributes:
        path: the pool's file.
        size_bytes: of it.
        serial: the device's.
    """

    path: str
    size_bytes: int
    serial: int


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """One guest.

    Attributes:
        qemu: the program.
        accelerator: "tcg" or "kvm".
        machine: its hardware.
        kernel, initramfs: what it boots.
        directory: where its sockets are.
        number: of the host, from 0.
        backings: the devices' memory.
        topology: how they hang together.
        switch_socket: of the guests' private network, None for a guest without one.
    """

    qemu: str
    accelerator: str
    machine: Machine
    kernel: str
    initramfs: str
    directory: str
    number: int
    backings: tuple[Backing, ...]
    topology: Topology
    switch_socket: str | None


def _value(text: str) -> str:
    """A text inside a QEMU option: a comma is written twice."""
    return text.replace(",", ",,")


def qmp_socket(directory: str) -> str:
    """Socket of QEMU's monitor."""
    return f"{directory}/qmp"


def mac(number: int) -> str:
    """MAC address of a host's interface."""
    return f"52:54:00:e5:00:{number + 1:02x}"


def address(number: int) -> str:
    """IPv4 address of a host."""
    return f"{NETWORK}.{number + 1}"


def qemu_argv(guest: GuestSpec) -> tuple[str, ...]:
    """The whole command.

    Every device that is not CXL names bus pcie.0: without it, QEMU picks the CXL host bridge and refuses.
    """
    machine = guest.machine
    cpu = machine.kvm_cpu if guest.accelerator == "kvm" else machine.tcg_cpu
    accelerator = "kvm" if guest.accelerator == "kvm" else "tcg,thread=multi"
    pool = sum(backing.size_bytes for backing in guest.backings)
    top = (parse_size(machine.memory) + pool + (1 << 30)) >> 20
    arguments = [guest.qemu, "-name", f"emu-host{guest.number}"]
    arguments += ["-M", ",".join(["q35,cxl=on", *_windows(guest.topology)])]
    arguments += ["-accel", accelerator, "-cpu", cpu, "-smp", str(machine.cpus)]
    arguments += ["-m", f"{machine.memory},maxmem={top}M,slots={SLOTS}"]
    arguments += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    arguments += ["-kernel", guest.kernel, "-initrd", guest.initramfs]
    arguments += ["-append", machine.kernel_arguments, "-serial", "stdio"]
    arguments += ["-qmp", f"unix:{_value(qmp_socket(guest.directory))},server=on,wait=off"]
    arguments += _host_root()
    arguments += _agent(guest.directory, machine.agent_ports)
    arguments += _network(guest)
    for bridge in range(guest.topology.bridges):
        arguments += _bridge(guest, bridge)
    return tuple(arguments)


def _windows(topology: Topology) -> list[str]:
    parts = []
    for number, region in enumerate(topology.regions):
        window = f"cxl-fmw.{number}"
        parts.append(f"{window}.targets.0=cxl.{region.bridge}")
        parts.append(f"{window}.size={region.size_bytes >> 20}M")
    return parts


def _host_root() -> list[str]:
    share = "local,id=hostroot,path=/,security_model=none,readonly=on,multidevs=remap"
    device = "virtio-9p-pci,bus=pcie.0,fsdev=hostroot,mount_tag=hostroot"
    return ["-fsdev", share, "-device", device]


def _agent(directory: str, ports: int) -> list[str]:
    arguments = ["-device", f"virtio-serial-pci,bus=pcie.0,id=agent,max_ports={ports + 1}"]
    for port in range(ports):
        socket = (
            f"socket,id=agent{port},path={_value(agent_socket(directory, port))},server=on,wait=off"
        )
        device = (
            f"virtserialport,bus=agent.0,nr={port + 1},chardev=agent{port},name=emu.agent{port}"
        )
        arguments += ["-chardev", socket, "-device", device]
    return arguments


def _network(guest: GuestSpec) -> list[str]:
    """Our switch, for a lone guest, too: an interface on an empty hub has a carrier but its sends time out."""
    if guest.switch_socket is None:
        return []
    net = f"stream,id=net0,server=off,addr.type=unix,addr.path={_value(guest.switch_socket)}"
    device = f"virtio-net-pci,bus=pcie.0,id=nic0,netdev=net0,mac={mac(guest.number)},host_mtu={MTU}"
    return ["-netdev", net, "-device", device]


def _bridge(guest: GuestSpec, bridge: int) -> list[str]:
    """A host bridge with a root port for each device, or one root port and a switch below it."""
    switched = guest.topology.kind == "switch"
    bus = FIRST_BUS + bridge * BUSES_PER_BRIDGE
    # With one root port a host bridge shows no decoder of its own, and Linux makes one region only.
    passthrough = ",hdm_for_passthrough=true"
    arguments = ["-device", f"pxb-cxl,bus_nr={bus},bus=pcie.0,id=cxl.{bridge}{passthrough}"]
    slot = 1 + bridge * 16
    if switched:
        root = f"cxl-rp,port=0,bus=cxl.{bridge},id=root{bridge},chassis=0,slot={slot}"
        arguments += ["-device", root, "-device", f"cxl-upstream,bus=root{bridge},id=up{bridge}"]
    for port, number in enumerate(guest.topology.devices_of(bridge)):
        place = f"chassis=0,slot={slot + 1 + port}"
        if switched:
            above = f"cxl-downstream,port={port},bus=up{bridge},id=port{number},{place}"
        else:
            above = f"cxl-rp,port={port},bus=cxl.{bridge},id=port{number},{place}"
        backing = guest.backings[number]
        memory = f"memory-backend-file,id=memory{number},share=on,mem-path={_value(backing.path)},size={backing.size_bytes}"
        device = f"cxl-type3,bus=port{number},volatile-memdev=memory{number},id=cxl{number},sn={backing.serial}"
        arguments += ["-device", above, "-object", memory, "-device", device]
    return arguments
