"""What `emu up` will do: a pure function of the spec and the facts about the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from emu.errors import HostError, TestbedError, UserError
from emu.provision.spec import MIN_DEVICE_BYTES, TestbedSpec
from emu.provision.steps import (
    AllocateDevice,
    MakeDirectory,
    MakeFile,
    MakeRoot,
    MakeScratch,
    StartProcess,
    Step,
    step_to_json,
)
from emu.registry import server_argv
from emu.server import READY
from emu.units import format_size

if TYPE_CHECKING:
    from emu.provision.facts import Facts

SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket (sun_path of unix(7), less its final zero)."""
NODE_PROCESS_BYTES = 64 << 20
"""What a memory node needs beside the memory that it serves (an interpreter with numpy, about 50 MiB)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device as programs see it.

    Attributes:
        path: what programs open.
        size_bytes: bytes to use.
        serial: its identity.
        existing: it was there before and stays.
    """

    path: str
    size_bytes: int
    serial: int
    existing: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What up will do, in order, and what programs will find then.

    Attributes:
        name: the testbed's name.
        driver: the driver chosen.
        reason: why.
        run_dir: where everything that up makes lies.
        hosts: names of the hosts.
        coherence: between hosts, "bi" or "none".
        profile: the system profile.
        devices: the pool.
        node_socket: the memory node's socket, None without one.
        memory_bytes: memory that the testbed takes.
        steps: what to do, in order; down undoes them in reverse.
    """

    name: str
    driver: str
    reason: str
    run_dir: str
    hosts: tuple[str, ...]
    coherence: str
    profile: str
    devices: tuple[Device, ...]
    node_socket: str | None
    memory_bytes: int
    steps: tuple[Step, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; every step with its "action"."""
        return {**asdict(self), "steps": [step_to_json(step) for step in self.steps]}


def choose_driver(requested: str) -> tuple[str, str]:
    """The driver and the reason for it.

    Raises:
        HostError: the driver asked for is not there.
    """
    if requested == "qemu":
        raise HostError(
            "this version has only the local driver", capability="qemu", remedy="use --driver local"
        )
    if requested == "local":
        return "local", "you asked for it"
    return "local", "this version has only the local driver"


def make_plan(spec: TestbedSpec, facts: Facts) -> Plan:
    """The plan that makes this testbed on this machine, or the reason why not; touches nothing.

    Raises:
        UserError: the spec asks for what this driver or this machine's sizes cannot give.
        HostError: the driver is not there, or memory or disk do not suffice; says the numbers.
        TestbedError: the name is taken, or something lies where the run directory would be.
    """
    driver, reason = choose_driver(spec.driver)
    _refuse_taken(spec, facts)
    _refuse_what_local_lacks(spec)
    run_dir = f"{facts.root}/{spec.name}"
    devices = tuple(
        _device(spec, number, f"{run_dir}/cxl{number}", facts)
        for number in range(len(spec.devices))
    )
    _refuse_twins(devices, facts)
    node_bytes = 0
    if spec.rdma == "node":
        node_bytes = spec.node_bytes or max(device.size_bytes for device in devices)
    socket = f"{run_dir}/memory-node.sock" if node_bytes else None
    if socket and len(socket.encode()) > SOCKET_PATH_BYTES:
        raise UserError(
            f"{socket} is too long for a socket",
            remedy="use a shorter --dir or --name, or --rdma off",
        )
    memory_bytes = _refuse_what_does_not_fit(devices, node_bytes, facts)
    plan = Plan(
        name=spec.name,
        driver=driver,
        reason=reason,
        run_dir=run_dir,
        hosts=tuple(f"host{number}" for number in range(spec.hosts)),
        coherence=spec.coherence,
        profile=spec.profile,
        devices=devices,
        node_socket=socket,
        memory_bytes=memory_bytes,
    )
    return replace(plan, steps=tuple(_steps(plan, node_bytes, facts)))


def _refuse_taken(spec: TestbedSpec, facts: Facts) -> None:
    if spec.name in facts.testbeds:
        raise TestbedError(
            f"testbed {spec.name!r} exists already",
            name=spec.name,
            remedy=f"run `emu down {spec.name}` first, or choose another --name",
        )
    if not facts.root_exists and not facts.root_is_default:
        raise UserError(f"{facts.root} is not a directory", remedy="make it, or name another --dir")
    if ":" in facts.root:
        raise UserError(f"{facts.root}: ':' separates devices", remedy="name another --dir")
    if facts.run_dir_exists:
        raise TestbedError(
            f"{facts.root}/{spec.name} exists and belongs to no testbed",
            name=spec.name,
            remedy="move it away, or choose another --name or --dir",
        )


def _refuse_what_local_lacks(spec: TestbedSpec) -> None:
    lacking = {
        "topology 'switch'": spec.topology != "direct",
        "interleave": spec.interleave != 1,
        "persistent devices": any(device.kind != "volatile" for device in spec.devices),
    }
    for what, asked in lacking.items():
        if asked:
            raise UserError(
                f"the local driver has no {what}",
                remedy="leave it out; what a switch costs is in the profile (--profile)",
            )


def _device(spec: TestbedSpec, number: int, made_path: str, facts: Facts) -> Device:
    device = spec.devices[number]
    if device.path is None:
        assert device.size_bytes is not None
        path, size_bytes = made_path, device.size_bytes
    else:
        path, size_bytes = device.path, _existing_size(device.path, device.size_bytes, facts)
    if size_bytes % facts.page_bytes or size_bytes < MIN_DEVICE_BYTES:
        raise UserError(
            f"device {number}: {size_bytes} bytes",
            remedy=f"use a multiple of the page size ({facts.page_bytes}) of at least 1M",
        )
    return Device(path, size_bytes, device.serial, existing=device.path is not None)


def _refuse_twins(devices: tuple[Device, ...], facts: Facts) -> None:
    """Two pools on the same bytes would destroy each other."""
    names: dict[tuple[str, int, int], str] = {}
    for path in (device.path for device in devices if device.existing):
        identity = facts.paths[path].identity
        if identity in names:
            raise UserError(
                f"devices {names[identity]} and {path} are the same device",
                remedy="name each device once, by whatever path",
            )
        if identity is not None:
            names[identity] = path


def _existing_size(path: str, wanted: int | None, facts: Facts) -> int:
    found = facts.paths[path]
    if found.kind == "missing":
        raise UserError(
            f"device {path} does not exist", remedy="name an existing file or /dev/daxN.M"
        )
    if found.kind == "other":
        raise UserError(
            f"device {path} is neither a file nor a devdax node",
            remedy="name an existing file or /dev/daxN.M",
        )
    if not found.usable:
        raise HostError(
            f"device {path} is not readable and writable", remedy="change its permissions"
        )
    if wanted is not None and wanted > found.size_bytes:
        raise UserError(
            f"device {path} has {format_size(found.size_bytes)}, not {format_size(wanted)}",
            remedy="ask for less, or leave size out",
        )
    return wanted or found.size_bytes


def _refuse_what_does_not_fit(devices: tuple[Device, ...], node_bytes: int, facts: Facts) -> int:
    """The memory that the testbed takes, if it fits."""
    sizes = [device.size_bytes for device in devices if not device.existing]
    on_disk = sum(sizes)
    memory = (on_disk if facts.memory_backed else 0) + (
        node_bytes + NODE_PROCESS_BYTES if node_bytes else 0
    )
    asked = f"{len(sizes)} device{'s' if len(sizes) != 1 else ''} of {format_size(on_disk)} in all"
    ways = "make --device-size smaller, ask for fewer devices"
    if on_disk > facts.fs_free_bytes:
        raise HostError(
            f"{asked} do not fit {facts.file_system}: {format_size(facts.fs_free_bytes)} free",
            capability="shm",
            remedy=f"{ways}, or put them elsewhere with --dir"
            + ("; a container takes --shm-size" if facts.file_system == "/dev/shm" else ""),
        )
    if node_bytes:
        asked += f" and a memory node of {format_size(node_bytes)}"
        ways += ", or go without the node by --rdma off"
    if facts.memory_backed:
        ways += ", or put the devices on a disk with --dir"
    limits = {"of memory are free": facts.free_memory_bytes}
    if facts.cgroup_free_bytes is not None:
        limits["are left below the cgroup's memory limit"] = facts.cgroup_free_bytes
    for words, free in limits.items():
        if memory > free:
            raise HostError(
                f"{asked} take {format_size(memory)} of memory, {format_size(free)} {words}",
                capability="memory",
                remedy=ways,
            )
    return memory


def _steps(plan: Plan, node_bytes: int, facts: Facts) -> list[Step]:
    steps: list[Step] = [MakeRoot(facts.root)] if facts.root_is_default else []
    steps.append(MakeDirectory(plan.run_dir))
    steps += [AllocateDevice(d.path, d.size_bytes) for d in plan.devices if not d.existing]
    steps.append(MakeScratch(scratch_path(plan.run_dir)))
    for host in plan.hosts:
        env = host_env(plan.name, host, plan.devices, plan.node_socket)
        lines = "".join(f"{key}={value}\n" for key, value in env.items())
        steps += [
            MakeFile(f"{plan.run_dir}/{host}.env", lines),
            MakeFile(log_path(plan.run_dir, host), ""),
        ]
    if plan.node_socket:
        argv = server_argv("rdma", plan.node_socket, node_bytes, python=facts.python)
        log = log_path(plan.run_dir, "memory-node")
        steps.append(MakeFile(log, ""))
        steps.append(StartProcess("memory-node", argv, log, READY, (plan.node_socket,)))
    return steps


def host_env(
    plan_name: str, host: str, devices: tuple[Device, ...], node: str | None
) -> dict[str, str]:
    """The environment that tells a host's programs where their pool is."""
    env = {
        "EMU_TESTBED": plan_name,
        "EMU_HOST": host,
        "EMU_CXL_DEVICES": ":".join(device.path for device in devices),
    }
    return env if node is None else {**env, "EMU_RDMA_NODE": node}


def scratch_path(run_dir: str) -> str:
    """Where runs have their directories."""
    return f"{run_dir}/runs"


def log_path(run_dir: str, role: str) -> str:
    """The log of a host or a process of the testbed."""
    return f"{run_dir}/{role}.log"
