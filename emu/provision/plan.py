"""What `emu up` will do: a pure function of the spec and the facts about the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from emu.errors import HostError, TestbedError, UserError
from emu.guest.session import agent_socket
from emu.provision.device_plan import Device, clear_steps, device_steps, plan_devices
from emu.provision.guest_plan import (
    guest_memory_bytes,
    guest_steps,
    plan_guests,
    refuse_what_qemu_lacks,
)
from emu.provision.native_rdma import native_steps
from emu.provision.steps import (
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
    from emu.guest.guest import Guest
    from emu.provision.facts import Facts
    from emu.provision.spec import TestbedSpec
    from emu.provision.state import Record

SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket (sun_path of unix(7), less its final zero)."""
NODE_PROCESS_BYTES = 64 << 20
"""What a memory node needs beside the memory that it serves (an interpreter with numpy, about 50 MiB)."""


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


def make_plan(spec: TestbedSpec, facts: Facts) -> Plan:
    """The plan that makes this testbed on this machine, or the reason why not; touches nothing.

    The driver "auto" is qemu where that can make what is asked for, else local; the plan's reason says why. Devices
    that exist already are the local driver's.

    Raises:
        UserError: the spec asks for what this driver or this machine's sizes cannot give.
        HostError: the driver is not there, or memory or disk do not suffice; says the numbers.
        TestbedError: the name is taken, or something lies where the run directory would be.
    """
    _refuse_taken(spec, facts)
    if spec.driver == "local":
        return _local_plan(spec, facts, "you asked for it")
    if spec.driver == "auto" and any(device.attached for device in spec.devices):
        return _local_plan(spec, facts, "attached devices are used as they are")
    try:
        plan = _guest_plan(spec, facts)
    except (UserError, HostError) as error:
        if spec.driver == "qemu":
            raise
        return _local_plan(spec, facts, str(error))
    return (
        replace(plan, reason=f"you asked for it; {plan.reason}") if spec.driver == "qemu" else plan
    )


def _local_plan(spec: TestbedSpec, facts: Facts, reason: str) -> Plan:
    _refuse_what_local_lacks(spec)
    run_dir = f"{facts.root}/{spec.name}"
    devices = plan_devices(spec, run_dir, facts)
    node_bytes = 0
    if spec.rdma in {"auto", "node"}:
        node_bytes = spec.node_bytes or max(device.size_bytes for device in devices)
    socket = f"{run_dir}/memory-node.sock" if node_bytes else None
    _refuse_long_socket(socket or "", "use a shorter --dir or --name, or --rdma off")
    plan = Plan(
        name=spec.name,
        driver="local",
        reason=reason,
        run_dir=run_dir,
        hosts=_host_names(spec),
        coherence=spec.coherence,
        profile=spec.profile,
        devices=devices,
        node_socket=socket,
        guests=(),
        memory_bytes=_refuse_what_does_not_fit(devices, _node_need(node_bytes), facts),
    )
    steps = _steps(plan, node_bytes, facts)
    steps += [*native_steps(spec, facts.no_native_rdma), *clear_steps(devices, facts)]
    return replace(plan, steps=tuple(steps))


def _guest_plan(spec: TestbedSpec, facts: Facts) -> Plan:
    """Raises: as make_plan."""
    if isinstance(facts.guests, HostError):
        raise facts.guests
    assert facts.guests is not None
    topology = refuse_what_qemu_lacks(spec)
    run_dir = f"{facts.root}/{spec.name}"
    devices = plan_devices(spec, run_dir, facts)
    found = plan_guests(spec, run_dir, topology, facts.guests)
    for guest in found:
        longest = agent_socket(guest.directory, guest.ports)
        _refuse_long_socket(longest, "use a shorter --dir or --name, or --driver local")
    need = _Need(
        f"{len(found)} guest{'s' if len(found) != 1 else ''}",
        guest_memory_bytes(facts.guests, len(found)),
        ", ask for fewer --hosts, or use --driver local",
    )
    plan = Plan(
        name=spec.name,
        driver="qemu",
        reason=facts.guests.describe(),
        run_dir=run_dir,
        hosts=_host_names(spec),
        coherence=spec.coherence,
        profile=spec.profile,
        devices=devices,
        node_socket=None,
        guests=found,
        memory_bytes=_refuse_what_does_not_fit(devices, need, facts),
    )
    steps = _steps(plan, 0, facts)
    steps += guest_steps(plan, topology, facts, rxe=spec.rdma != "off")
    return replace(plan, steps=tuple(steps))


def _host_names(spec: TestbedSpec) -> tuple[str, ...]:
    return tuple(f"host{number}" for number in range(spec.hosts))


def _refuse_long_socket(path: str, remedy: str) -> None:
    if len(path.encode()) > SOCKET_PATH_BYTES:
        raise UserError(f"{path} is too long for a socket", remedy=remedy)


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
        "rdma 'rxe'": spec.rdma == "rxe",
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


@dataclass(frozen=True, slots=True)
class _Need:
    """Memory beside the devices': what for, how much, and how to do with less."""

    words: str
    nbytes: int
    ways: str


def _node_need(node_bytes: int) -> _Need | None:
    if not node_bytes:
        return None
    words = f"a memory node of {format_size(node_bytes)}"
    return _Need(words, node_bytes + NODE_PROCESS_BYTES, ", or go without the node by --rdma off")


def _refuse_what_does_not_fit(devices: tuple[Device, ...], need: _Need | None, facts: Facts) -> int:
    """The memory that the testbed takes, if it fits."""
    sizes = [device.size_bytes for device in devices if not device.existing]
    on_disk = sum(sizes)
    memory = on_disk if facts.memory_backed else 0
    asked = f"{len(sizes)} device{'s' if len(sizes) != 1 else ''} of {format_size(on_disk)} in all"
    ways = "make --device-size smaller, ask for fewer devices"
    if on_disk > facts.fs_free_bytes:
        raise HostError(
            f"{asked} do not fit {facts.file_system}: {format_size(facts.fs_free_bytes)} free",
            capability="shm",
            remedy=f"{ways}, or put them elsewhere with --dir"
            + ("; a container takes --shm-size" if facts.memory_backed else ""),
        )
    if need is not None:
        memory += need.nbytes
        asked += f" and {need.words}"
        ways += need.ways
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
    steps += device_steps(plan.devices, facts)
    steps.append(MakeScratch(scratch_path(plan.run_dir)))
    for host in plan.hosts:
        env = host_env(plan, host)
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
