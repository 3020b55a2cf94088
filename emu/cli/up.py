"""`emu up`: bring a testbed up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table, progress

if TYPE_CHECKING:
    from emu.provision.plan import Plan


@click.command("up")
@click.option(
    "--cxl-devices", type=int, metavar="N", help="Number of devices in the pool, 1 to 16."
)
@click.option("--driver", metavar="auto|local|qemu", help="What makes the devices. [default: auto]")
@click.option("--device-size", metavar="SIZE", help="Size of each device. [default: 256M]")
@click.option("--hosts", type=int, metavar="N", help="Number of hosts. [default: 1]")
@click.option("--coherence", metavar="bi|none", help="Between hosts. [default: bi]")
@click.option("--profile", metavar="NAME", help="System profile. [default: sac-server]")
@click.option("--rdma", metavar="node|off", help="Start a memory node or not. [default: node]")
@click.option("--name", metavar="NAME", help="Name of the testbed. [default: default]")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Where its files go. [default: /dev/shm]",
)
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    help="A TOML spec; flags beat it, but the number of its devices stands.",
)
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
    plan = make_plan(spec, gather_facts(spec, directory, state.names()))
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


def _print(plan: Plan, *, dry_run: bool) -> None:
    from emu.units import format_size

    if dry_run:
        print_table(("step", "action"), list(enumerate(plan.steps, 1)))
        click.echo(f"takes {format_size(plan.memory_bytes)} of memory")
        return
    rows = [(f"cxl{n}", format_size(d.size_bytes), d.path) for n, d in enumerate(plan.devices)]
    if plan.node_socket:
        rows.append(("memory node", "", plan.node_socket))
    print_table(("device", "size", "path"), rows)
    name = "" if plan.name == "default" else f" {plan.name}"
    option = "" if plan.name == "default" else f" --name {plan.name}"
    click.echo(
        f"testbed {plan.name} is up: `emu exec{option} {plan.hosts[0]} -- CMD` runs a program in it, "
        f"`emu down{name}` takes it down"
    )
