"""The part of a plan that makes guests: sockets, the private network, QEMU for each host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.guest.guest import Guest
from emu.provision import guests
from emu.provision.guest_facts import GuestFacts
from emu.provision.native_rdma import refuse_in_guests
from emu.provision.steps import MakeFile, MakeScratch, SetUpGuest, StartGuest, StartProcess, Step
from emu.provision.topology import lay_out
from emu.units import parse_size

if TYPE_CHECKING:
    from emu.provision.facts import Facts
    from emu.provision.plan import Plan
    from emu.provision.spec import TestbedSpec
    from emu.provision.topology import Topology

QEMU_BYTES = 256 << 20
"""What a QEMU process needs beside its guest's memory (measured: 100 to 200 MiB of translated code and tables)."""


def refuse_what_qemu_lacks(spec: TestbedSpec) -> Topology:
    """The topology, if QEMU and Linux can have it.

    Raises:
        UserError: they cannot.
    """
    if spec.rdma == "node":
        raise UserError(
            "guests cannot reach a memory node on this machine", remedy="use --rdma rxe or off"
        )
    refuse_in_guests(spec)
    for number, device in enumerate(spec.devices):
        if device.attached:
            raise UserError(
                f"device {number}: {device.attached} exists already, the qemu driver makes its own",
                remedy="use --driver local, or --cxl-devices in place of --attach",
            )
        if device.kind != "volatile":
            raise UserError(
                f"device {number}: the qemu driver has no {device.kind} devices in this version",
                remedy='use kind = "volatile"',
            )
    sizes = [device.size_bytes or 0 for device in spec.devices]
    return lay_out(sizes, spec.topology, spec.interleave)


def plan_guests(
    spec: TestbedSpec, run_dir: str, topology: Topology, facts: GuestFacts
) -> tuple[Guest, ...]:
    """The guests of a testbed."""
    ports = facts.machine.agent_ports
    devices = tuple(f"/dev/dax{number}.0" for number in range(len(topology.regions)))
    sizes = tuple(region.size_bytes for region in topology.regions)
    return tuple(
        Guest(f"host{number}", f"{run_dir}/host{number}.guest", ports, devices, sizes)
        for number in range(spec.hosts)
    )


def guest_memory_bytes(facts: GuestFacts, hosts: int) -> int:
    """Memory that the guests take at most, beside the pool."""
    return hosts * (parse_size(facts.machine.memory) + QEMU_BYTES)


def guest_steps(plan: Plan, topology: Topology, facts: Facts, *, rxe: bool) -> list[Step]:
    """Steps that start a plan's guests side by side, then set each up."""
    assert isinstance(facts.guests, GuestFacts)
    switch = f"{plan.run_dir}/network.sock"
    log = f"{plan.run_dir}/network.log"
    argv = (facts.python, "-P", "-m", "emu.guest.network_switch", "--socket", switch)
    steps: list[Step] = [MakeFile(log, "")]
    steps.append(StartProcess("network", argv, log, "ready", (switch,)))
    peers = tuple(f"{g.host}={guests.address(n)}" for n, g in enumerate(plan.guests))
    regions = tuple(tuple(plan.devices[d].serial for d in r.devices) for r in topology.regions)
    setting_up: list[Step] = []
    for number, guest in enumerate(plan.guests):
        spec = guests.GuestSpec(
            qemu=facts.guests.qemu,
            accelerator=facts.guests.accelerator,
            machine=facts.guests.machine,
            kernel=facts.guests.image.kernel,
            initramfs=facts.guests.image.initramfs,
            directory=guest.directory,
            number=number,
            backings=tuple(guests.Backing(d.path, d.size_bytes, d.serial) for d in plan.devices),
            topology=topology,
            switch_socket=switch,
        )
        console = f"{plan.run_dir}/{guest.host}-console.log"
        steps += [MakeScratch(guest.directory), MakeFile(console, "")]
        steps.append(StartGuest(guest.host, guests.qemu_argv(spec), console))
        setting_up.append(
            SetUpGuest(
                host=guest.host,
                directory=guest.directory,
                ports=guest.ports,
                regions=regions,
                mac=guests.mac(number),
                address=guests.address(number),
                peers=peers,
                rxe=rxe,
            )
        )
    return steps + setting_up
