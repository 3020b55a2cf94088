"""`emu status`: the testbeds and what is left of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from emu.cli.common import json_option, print_json, print_table
from emu.units import format_size

if TYPE_CHECKING:
    from emu.provision.condition import Condition
    from emu.provision.state import Record


@click.command("status")
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="Exit 1 unless what is shown is up, and there is one.")
@json_option
def command(name: str | None, check: bool, as_json: bool) -> None:
    """Show the testbeds (or the one of that NAME), and what remains of those that were cut short."""
    from emu.provision.condition import inspect
    from emu.provision.spec import check_name
    from emu.provision.state import StateDirectory

    state = StateDirectory()
    names = state.names() if name is None else [check_name("NAME", name)]
    conditions = [inspect(state, each) for each in names]
    if as_json:
        print_json({"testbeds": [condition.to_json() for condition in conditions]})
    elif not conditions:
        click.echo("no testbed; make one with `emu up --cxl-devices 2`")
    else:
        _print(conditions)
    if check and (not conditions or any(each.state != "up" for each in conditions)):
        sys.exit(1)


def _print(conditions: list[Condition]) -> None:
    from emu.provision.condition import REMEDY_STATES

    rows = []
    for found in conditions:
        record = found.record
        if record is None:
            rows.append((found.name, found.state, *"------"))
            continue
        rows.append(
            (
                found.name,
                found.state,
                record.driver,
                str(len(record.hosts)),
                _devices(record),
                record.profile,
                record.coherence,
                record.run_dir,
            )
        )
    header = ("name", "state", "driver", "hosts", "devices", "profile", "coherence", "directory")
    print_table(header, rows)
    for found in conditions:
        for row in found.processes:
            where = f" on {row['host']}" if row["host"] else ""
            click.echo(f"{found.name}: process {row['pid']} {row['role']}{where}")
        if found.state in REMEDY_STATES:
            for path in found.remains:
                click.echo(f"{found.name}: remains {path}")
            for fault in found.faults:
                click.echo(f"{found.name}: {fault}")
            click.echo(found.problem or f"{found.name}: clear it with `emu down {found.name}`")


def _devices(record: Record) -> str:
    """How many of which size: "2 x 64 MiB"; sizes that differ one by one."""
    sizes = [format_size(device.size_bytes) for device in record.devices]
    return " + ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes))
