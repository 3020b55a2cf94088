"""The part of a plan that makes guests: sockets, the private network, QEMU for each host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.provision import guests
from emu.provision.steps import MakeFile, MakeScratch, SetUpGuest, StartGuest, StartProcess, Step
from emu.provision.topology import lay_out
from emu.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.provision.guest_facts import GuestFacts
    from emu.provision.spec import TestbedSpec
    from emu.provision.topology import Topology

QEMU_BYTES = 256 << 20
"""What a QEMU process needs beside its guest's memory (measured: 100 to 200 MiB of translated code and tables)."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest as commands need to know it.

    Attributes:
        host: its name.
        directory: where its sockets are.
        ports: of its agent.
        devices: paths of the pool's regions inside.
    """

    host: str
    directory: str
    ports: int
    devices: tuple[str, ...]


def refuse_what_qemu_lacks(spec: TestbedSpec) -> Topology:
    """The topology, if QEMU and Linux can have it.

    Raises:
        UserError: they cannot.
    """
    for number, device in enumerate(spec.devices):
        if device.path is not None:
            raise UserError(
                f"device {number}: {device.path} exists already, the qemu driver makes its own",
                remedy="leave the path out, or use --driver local",
            )
        if device.kind != "volatile":
            raise UserError(
                f"device {number}: the qemu driver has no {device.kind} devices in this version",
                remedy='use kind = "volatile"',
            )
    sizes = [device.size_bytes or 0 for device in spec.devices]
    return lay_out(sizes, spec.topology, spec.interleave)


def plan_guests(spec: TestbedSpec, run_dir: str, topology: Topology) -> tuple[Guest, ...]:
    """The guests of a testbed."""
    from emu.provision.guest_facts import load_machine

    ports = load_machine().agent_ports
    devices = tuple(f"/dev/dax{number}.0" for number in range(len(topology.regions)))
    return tuple(
        Guest(f"host{number}", f"{run_dir}/host{number}.guest", ports, devices)
        for number in range(spec.hosts)
    )


def guest_memory_bytes(facts: GuestFacts, hosts: int) -> int:
    """Memory that the guests take at most, beside the pool."""
    return hosts * (parse_size(facts.machine.memory) + QEMU_BYTES)


def guest_steps(
    run_dir: str,
    found: Sequence[Guest],
    backings: tuple[guests.Backing, ...],
    topology: Topology,
    facts: GuestFacts,
    python: str,
) -> list[Step]:
    """Steps that start the guests side by side, then set each up."""
    switch = f"{run_dir}/network.sock"
    log = f"{run_dir}/network.log"
    argv = (python, "-P", "-m", "emu.provision.network_switch", "--socket", switch)
    steps: list[Step] = [MakeFile(log, "")]
    steps.append(StartProcess("network", argv, log, "ready", (switch,)))
    peers = tuple(f"{g.host}={guests.address(n)}" for n, g in enumerate(found))
    regions = tuple(tuple(backings[d].serial for d in r.devices) for r in topology.regions)
    setting_up: list[Step] = []
    for number, guest in enumerate(found):
        spec = guests.GuestSpec(
            qemu=facts.qemu,
            accelerator=facts.accelerator,
            machine=facts.machine,
            kernel=facts.image.kernel,
            initramfs=facts.image.initramfs,
            directory=guest.directory,
            number=number,
            backings=backings,
            topology=topology,
            switch_socket=switch,
        )
        console = f"{run_dir}/{guest.host}-console.log"
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
            )
        )
    return steps + setting_up
