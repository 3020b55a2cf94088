"""`emu up`: bring a testbed up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table, progress

if TYPE_CHECKING:
    from emu.provision.device_plan import Device
    from emu.provision.plan import Plan


@click.command("up")
@click.option(
    "--cxl-devices", type=int, metavar="N", help="Number of devices in the pool, 1 to 16."
)
@click.option(
    "--attach",
    multiple=True,
    metavar="PATH|numa:N",
    help="A device that exists: /dev/daxN.M, a file, or memory of NUMA node N. May be repeated.",
)
@click.option("--overwrite", is_flag=True, help="An attached device may lose what it holds.")
@click.option("--driver", metavar="auto|local|qemu", help="What makes the devices. [default: auto]")
@click.option("--device-size", metavar="SIZE", help="Size of each device. [default: 256M]")
@click.option("--topology", metavar="direct|switch", help="Of a guest's devices. [default: direct]")
@click.option("--interleave", type=int, metavar="N", help="Devices in one region. [default: 1]")
@click.option("--hosts", type=int, metavar="N", help="Number of hosts. [default: 1]")
@click.option("--coherence", metavar="bi|none", help="Between hosts. [default: bi]")
@click.option("--profile", metavar="NAME", help="System profile. [default: sac-server]")
@click.option(
    "--rdma",
    metavar="auto|node|rxe|native|off",
    help="A memory node, soft-RoCE in guests, or soft-RoCE of this machine. [default: auto]",
)
@click.option("--name", metavar="NAME", help="Name of the testbed. [default: default]")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Where its files go. [default: /dev/shm]",
)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A TOML spec; flags beat it.")
@click.option("--dry-run", is_flag=True, help="Print the plan, do nothing.")
@json_option
def command(
    directory: Path | None, file: Path | None, dry_run: bool, as_json: bool, **flags: Any
) -> None:
    """Bring a testbed up: device files, hosts, a memory node."""
    from emu.provision.facts import gather_facts
    from emu.provision.plan import make_plan
    from emu.provision.runner import Runner
    from emu.provision.spec import flags_of, make_spec
    from emu.provision.state import StateDirectory

    state = StateDirectory()
    spec = make_spec(flags_of(flags), file)
    plan = make_plan(spec, gather_facts(spec, directory, state.testbeds()))
    if not as_json:
        click.echo(f"{plan.driver}, because {plan.reason}")
    if not dry_run:
        from emu.cli.signals import ending_by_exception

        with ending_by_exception():
            Runner(state, progress).up(plan)
    if as_json:
        print_json({"dry_run": dry_run, "plan": plan.to_json()})
    else:
        _print(plan, dry_run=dry_run)


def _place(device: Device) -> str:
    return device.path + ("" if device.numa_node is None else f" (NUMA node {device.numa_node})")


def _print(plan: Plan, *, dry_run: bool) -> None:
    from emu.units import format_size

    if dry_run:
        print_table(("step", "action"), list(enumerate(plan.steps, 1)))
        click.echo(f"takes {format_size(plan.memory_bytes)} of memory")
        return
    rows = [(f"cxl{n}", format_size(d.size_bytes), _place(d)) for n, d in enumerate(plan.devices)]
    if plan.node_socket:
        rows.append(("memory node", "", plan.node_socket))
    print_table(("device", "size", "path"), rows)
    name = "" if plan.name == "default" else f" {plan.name}"
    option = "" if plan.name == "default" else f" --name {plan.name}"
    click.echo(
        f"testbed {plan.name} is up: `emu exec{option} {plan.hosts[0]} -- CMD` runs a program in it, "
        f"`emu down{name}` takes it down"
    )
