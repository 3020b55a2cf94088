"""What `emu up` will do: a pure function of the spec and the facts about the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from emu.errors import HostError, TestbedError, UserError
from emu.provision.guest_facts import GuestFacts
from emu.provision.guest_plan import (
    Guest,
    guest_memory_bytes,
    guest_steps,
    plan_guests,
    refuse_what_qemu_lacks,
)
from emu.provision.guests import Backing, agent_socket
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
from emu.units import format_size

if TYPE_CHECKING:
    from emu.provision.facts import Facts
    from emu.provision.state import Record

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
        guests: of the qemu driver, one for each host.
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
    guests: tuple[Guest, ...]
    memory_bytes: int
    steps: tuple[Step, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; every step with its "action"."""
        return {**asdict(self), "steps": [step_to_json(step) for step in self.steps]}


def choose_driver(spec: TestbedSpec, facts: Facts) -> tuple[str, str]:
    """The driver and the reason for it.

    Raises:
        HostError: the driver asked for is not there.
        UserError: it cannot make what the spec says.
    """
    if spec.driver == "local":
        return "local", "you asked for it"
    if isinstance(facts.guests, GuestFacts):
        words = f"QEMU {facts.guests.version} with {facts.guests.accelerator} and kernel {facts.guests.image.version}"
        if spec.driver == "qemu":
            return "qemu", f"you asked for it; {words}"
        try:
            refuse_what_qemu_lacks(spec)
        except UserError as error:
            return "local", error.message
        if spec.rdma == "node":
            return "local", "guests cannot reach a memory node on this machine"
        return "qemu", f"{words} is there"
    assert facts.guests is not None
    if spec.driver == "qemu":
        raise facts.guests
    return "local", str(facts.guests)


def make_plan(spec: TestbedSpec, facts: Facts) -> Plan:
    """The plan that makes this testbed on this machine, or the reason why not; touches nothing.

    Raises:
        UserError: the spec asks for what this driver or this machine's sizes cannot give.
        HostError: the driver is not there, or memory or disk do not suffice; says the numbers.
        TestbedError: the name is taken, or something lies where the run directory would be.
    """
    driver, reason = choose_driver(spec, facts)
    _refuse_taken(spec, facts)
    run_dir = f"{facts.root}/{spec.name}"
    found: tuple[Guest, ...] = ()
    topology = None
    if driver == "local":
        _refuse_what_local_lacks(spec)
    else:
        topology = refuse_what_qemu_lacks(spec)
        found = plan_guests(spec, run_dir, topology)
    devices = tuple(
        _device(spec, number, f"{run_dir}/cxl{number}", facts)
        for number in range(len(spec.devices))
    )
    node_bytes = 0
    if spec.rdma == "node" or (spec.rdma == "auto" and driver == "local"):
        node_bytes = spec.node_bytes or max(device.size_bytes for device in devices)
    socket = f"{run_dir}/memory-node.sock" if node_bytes else None
    _refuse_long_sockets(socket, found)
    memory_bytes = _refuse_what_does_not_fit(devices, node_bytes, facts, len(found))
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
        guests=found,
        memory_bytes=memory_bytes,
    )
    steps = _steps(plan, node_bytes, facts)
    if topology is not None:
        assert isinstance(facts.guests, GuestFacts)
        backings = tuple(Backing(d.path, d.size_bytes, d.serial) for d in devices)
        steps += guest_steps(run_dir, found, backings, topology, facts.guests, facts.python)
    return replace(plan, steps=tuple(steps))


def _refuse_long_sockets(node: str | None, found: tuple[Guest, ...]) -> None:
    sockets = [node] if node else []
    sockets += [agent_socket(guest.directory, guest.ports) for guest in found]
    for socket in sockets:
        if len(socket.encode()) > SOCKET_PATH_BYTES:
            raise UserError(
                f"{socket} is too long for a socket",
                remedy="use a shorter --dir or --name, or --rdma off",
            )


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


def _existing_size(path: str, wanted: int | None, facts: Facts) -> int:
    found = facts.paths[path]
    if found.kind == "missing":
        raise UserError(
            f"device {path} does not exist", remedy="name an existing file or /dev/daxN.M"
        )
    if found.kind == "other":
        raise UserError(f"device {path} is neither a file nor a devdax node")
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


def _refuse_what_does_not_fit(
    devices: tuple[Device, ...], node_bytes: int, facts: Facts, hosts: int
) -> int:
    """The memory that the testbed takes, if it fits."""
    sizes = [device.size_bytes for device in devices if not device.existing]
    on_disk = sum(sizes)
    memory = (on_disk if facts.memory_backed else 0) + (
        node_bytes + NODE_PROCESS_BYTES if node_bytes else 0
    )
    if hosts:
        assert isinstance(facts.guests, GuestFacts)
        memory += guest_memory_bytes(facts.guests, hosts)
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
    if hosts:
        asked += f" and {hosts} guest{'s' if hosts != 1 else ''}"
        ways += ", fewer hosts, or use --driver local"
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
        env = host_env(plan, host)
        lines = "".join(f"{key}={value}\n" for key, value in env.items())
        steps += [
            MakeFile(f"{plan.run_dir}/{host}.env", lines),
            MakeFile(log_path(plan.run_dir, host), ""),
        ]
    if plan.node_socket:
        module = (facts.python, "-P", "-m", "backends.memory_node")
        argv = (*module, "--socket", plan.node_socket, "--size", str(node_bytes))
        log = log_path(plan.run_dir, "memory-node")
        steps.append(MakeFile(log, ""))
        steps.append(StartProcess("memory-node", argv, log, "ready", (plan.node_socket,)))
    return steps


def host_env(where: Plan | Record, host: str) -> dict[str, str]:
    """The environment that tells a host's programs where their pool is."""
    inside = {guest.host: guest.devices for guest in where.guests}
    devices = inside.get(host, tuple(device.path for device in where.devices))
    env = {"EMU_TESTBED": where.name, "EMU_HOST": host, "EMU_CXL_DEVICES": ":".join(devices)}
    return env if where.node_socket is None else {**env, "EMU_RDMA_NODE": where.node_socket}


def scratch_path(run_dir: str) -> str:
    """Where runs have their directories."""
    return f"{run_dir}/runs"


def log_path(run_dir: str, role: str) -> str:
    """The log of a host or a process of the testbed."""
    return f"{run_dir}/{role}.log"
