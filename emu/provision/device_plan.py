"""The part of a plan that is the pool: which devices, made or attached, and the refusal of what cannot be one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import HostError, TestbedError, UserError
from emu.provision.spec import MIN_DEVICE_BYTES
from emu.provision.steps import AllocateDevice, AttachDevice, ClearDevice
from emu.units import format_size

if TYPE_CHECKING:
    from emu.provision.attached import PathFacts
    from emu.provision.facts import Facts
    from emu.provision.spec import DeviceSpec, TestbedSpec
    from emu.provision.steps import Step


@dataclass(frozen=True, slots=True)
class Device:
    """One device as programs see it.

    Attributes:
        path: what programs open.
        size_bytes: bytes to use.
        serial: its identity.
        existing: it was there before and stays.
        numa_node: the node that its memory was bound to, None for anywhere.
    """

    path: str
    size_bytes: int
    serial: int
    existing: bool
    numa_node: int | None = None


def plan_devices(spec: TestbedSpec, run_dir: str, facts: Facts) -> tuple[Device, ...]:
    """The pool, in the order of the spec.

    Raises:
        UserError, HostError, TestbedError: a device that cannot be had; says which, why and what to do.
    """
    devices = tuple(
        _attached(number, device, facts, overwrite=spec.overwrite)
        if device.path is not None
        else _made(number, device, f"{run_dir}/cxl{number}", facts)
        for number, device in enumerate(spec.devices)
    )
    _refuse_one_device_twice(devices, facts)
    _refuse_full_nodes(devices, facts)
    return devices


def device_steps(devices: tuple[Device, ...], facts: Facts) -> list[Step]:
    """What takes or makes the devices: those that exist are taken first, as that costs nothing."""
    steps: list[Step] = []
    for device in devices:
        if device.existing:
            found = facts.paths[device.path]
            steps.append(AttachDevice(found.resolved, found.has_directory))
    for device in devices:
        if not device.existing:
            steps.append(AllocateDevice(device.path, device.size_bytes, device.numa_node))
    return steps


def clear_steps(devices: tuple[Device, ...], facts: Facts) -> list[Step]:
    """What overwrites foreign content, as --overwrite allows; for the end of a plan, as nothing undoes it."""
    return [
        ClearDevice(facts.paths[device.path].resolved, device.size_bytes)
        for device in devices
        if device.existing and facts.paths[device.path].foreign
    ]


def _made(number: int, device: DeviceSpec, path: str, facts: Facts) -> Device:
    assert device.size_bytes is not None
    if device.size_bytes % facts.page_bytes or device.size_bytes < MIN_DEVICE_BYTES:
        raise UserError(
            f"device {number}: {device.size_bytes} bytes",
            remedy=f"use a multiple of the page size ({facts.page_bytes}) of at least 1M",
        )
    if device.numa_node is not None:
        _refuse_node(device.numa_node, facts)
    return Device(path, device.size_bytes, device.serial, False, device.numa_node)


def _refuse_node(node: int, facts: Facts) -> None:
    if not facts.nodes:
        raise HostError(
            f"numa:{node}: this kernel knows no NUMA nodes",
            capability="numa",
            remedy="use --cxl-devices 1 for memory without a node",
        )
    listed = ", ".join(f"numa:{n}" for n, found in facts.nodes.items() if found.allowed)
    if node not in facts.nodes:
        raise UserError(f"there is no NUMA node {node} with memory", remedy=f"use one of: {listed}")
    if not facts.nodes[node].allowed:
        raise HostError(
            f"NUMA node {node} is outside this process's cpuset",
            capability="numa",
            remedy=f"use one of: {listed}; or widen cpuset.mems (docker run --cpuset-mems)",
        )
    if not facts.memory_backed:
        raise UserError(
            f"numa:{node}: files below {facts.root} lie on a disk, not in a node's memory",
            remedy="name a --dir on tmpfs, or leave --dir out",
        )


def _refuse_full_nodes(devices: tuple[Device, ...], facts: Facts) -> None:
    """An allocation bound to a node that is full ends in the kernel killing a process: never begin one."""
    asked: Counter[int] = Counter()
    for device in devices:
        if device.numa_node is not None:
            asked[device.numa_node] += device.size_bytes
    for node, nbytes in asked.items():
        free = facts.nodes[node].free_bytes
        if nbytes > free:
            raise HostError(
                f"NUMA node {node} has {format_size(free)} free, not {format_size(nbytes)}",
                capability="memory",
                remedy="make --device-size smaller, or use another node",
            )


def _attached(number: int, device: DeviceSpec, facts: Facts, *, overwrite: bool) -> Device:
    assert device.path is not None
    found = facts.paths[device.path]
    _refuse_unusable(device.path, found)
    _refuse_size(device, found)
    if found.foreign and not overwrite:
        raise UserError(
            f"device {device.path} holds {found.foreign}",
            remedy="name another device, or add --overwrite to lose that",
        )
    return Device(device.path, found.size_bytes, device.serial, existing=True)


def _refuse_unusable(path: str, found: PathFacts) -> None:
    if found.kind == "missing":
        raise UserError(
            f"device {path} does not exist",
            remedy="name an existing file or /dev/daxN.M (in mode devdax, not system-ram)",
        )
    if found.kind == "other":
        raise UserError(
            f"device {path} is neither a file nor a devdax node", remedy="name one that is"
        )
    if not found.usable:
        raise HostError(
            f"device {path} is not readable and writable by you",
            remedy=f'as root: chown "$USER" {path}',
        )
    if not found.folder_writable:
        raise HostError(
            f"device {path}: stores keep the pool's directory beside it, and you may not write there",
            remedy="run emu as root, or attach a file in a folder of yours",
        )
    if found.holder:
        raise TestbedError(
            f"device {path} is in use by testbed {found.holder!r}",
            name=found.holder,
            remedy=f"run `emu down {found.holder}` first, or name another device",
        )


def _refuse_size(device: DeviceSpec, found: PathFacts) -> None:
    if device.size_bytes is not None and device.size_bytes != found.size_bytes:
        raise UserError(
            f"device {device.path} has {format_size(found.size_bytes)}, not {format_size(device.size_bytes)}",
            remedy="leave size out: an existing device is used whole and never resized",
        )
    if found.size_bytes % found.align_bytes or found.size_bytes < MIN_DEVICE_BYTES:
        raise UserError(
            f"device {device.path} has {found.size_bytes} bytes",
            remedy=f"it must be a multiple of {format_size(found.align_bytes)} and at least 1M; emu never resizes it",
        )


def _refuse_one_device_twice(devices: tuple[Device, ...], facts: Facts) -> None:
    seen: dict[str, str] = {}
    for device in devices:
        if device.existing:
            identity = facts.paths[device.path].identity
            other = seen.setdefault(identity, device.path)
            if identity and other != device.path:
                raise UserError(
                    f"{other} and {device.path} are one device", remedy="attach it once"
                )
