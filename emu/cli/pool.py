"""`emu pool`: look at the pool on a device, check it, repair it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from emu.cli.common import json_option, name_option, print_json, print_table
from emu.errors import MediumError
from emu.units import format_size

if TYPE_CHECKING:
    from emu.pool.inspect import Inspection

_devices = click.argument("devices", metavar="[DEVICE]...", nargs=-1)
_force = click.option("--force", is_flag=True, help="Although somebody seems to have it open.")
_dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@click.group()
def command() -> None:
    """Look at the pools on devices (paths; without one, those of the testbed that is up)."""


@command.command("ls")
@_devices
@name_option
@json_option
def list_requests(devices: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """List the requests in a pool."""
    found = _inspect(devices, name)
    if as_json:
        keys = ("device", "requests")
        print_json({"pools": [{key: one.to_json()[key] for key in keys} for one in found]})
        return
    rows = [
        (
            one.device,
            request.key,
            request.state,
            request.num_tokens,
            request.shared_tokens,
            len(request.blocks),
            request.leases,
            request.generation,
        )
        for one in found
        for request in one.requests
    ]
    header = ("device", "key", "state", "tokens", "shared", "blocks", "leases", "generation")
    print_table(header, rows)


@command.command("stat")
@_devices
@name_option
@json_option
def show_state(devices: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """Say how full a pool is and who has it open."""
    found = _inspect(devices, name)
    if as_json:
        shown = [{k: v for k, v in one.to_json().items() if k != "requests"} for one in found]
        print_json({"pools": shown})
        return
    rows = [
        (
            one.device,
            f"{one.used_blocks}/{one.header.num_blocks}",
            len(one.requests),
            f"{len(one.alive)}/{one.header.metadata.slots}",
            one.transactions,
            format_size(one.header.metadata.nbytes),
            one.header.uuid.hex(),
        )
        for one in found
    ]
    print_table(("device", "blocks", "requests", "open", "transactions", "metadata", "uuid"), rows)
    members = [
        (
            one.device,
            who.slot,
            who.epoch,
            who.seat,
            who.pid,
            "gone" if who.gone else "there",
            who.leases,
        )
        for one in found
        for who in one.members
    ]
    click.echo()
    print_table(("device", "slot", "epoch", "seat", "pid", "process", "leases"), members)


@command.command("dump")
@_devices
@name_option
def dump(devices: tuple[str, ...], name: str | None) -> None:
    """Print everything that a pool says of itself, as JSON."""
    print_json({"pools": [one.to_json() for one in _inspect(devices, name)]})


@command.command("check")
@_devices
@click.option(
    "--repair", "mend", is_flag=True, help="Write a damaged pool anew from what is whole."
)
@_force
@_dry_run
@name_option
@json_option
def check(
    devices: tuple[str, ...],
    mend: bool,
    force: bool,
    dry_run: bool,
    name: str | None,
    as_json: bool,
) -> None:
    """Read a pool offline and say what is wrong with it; exit 1 if something is."""
    from emu.pool.inspect import inspect, repair

    reports = []
    for path in _paths(devices, name):
        before, after = (inspect(path), None) if dry_run or not mend else repair(path, force=force)
        reports.append((before, after if before.problems else None))
    if as_json:
        print_json({"pools": [_check_json(*report) for report in reports]})
    else:
        for before, after in reports:
            _print_check(before, after)
    left = [before for before, after in reports if (after or before).problems]
    if left:
        raise MediumError(
            f"{', '.join(one.device for one in left)}: {sum(len(one.problems) for one in left)} problems",
            device=left[0].device,
            status="METADATA_DAMAGED",
            remedy="emu pool check --repair",
        )


@command.command("format")
@click.argument("devices", metavar="DEVICE...", nargs=-1, required=True)
@_force
@_dry_run
def format_devices(devices: tuple[str, ...], force: bool, dry_run: bool) -> None:
    """Give up whatever is on the devices; the next store that opens one makes a new pool on it."""
    from emu.pool.inspect import clear

    for path in devices:
        if not dry_run:
            clear(path, force=force)
        click.echo(f"{path}: {'would be' if dry_run else 'is'} empty")


def _check_json(before: Inspection, after: Inspection | None) -> dict[str, object]:
    return {
        "device": before.device,
        "problems": list(before.problems),
        "notes": list(before.notes),
        "requests": len(before.requests),
        "repaired": after is not None and not after.problems,
        "requests_after": None if after is None else len(after.requests),
    }


def _print_check(before: Inspection, after: Inspection | None) -> None:
    for what in before.problems:
        click.echo(f"{before.device}: {what}")
    for what in before.notes:
        click.echo(f"{before.device}: note: {what}")
    if after is not None:
        click.echo(f"{before.device}: repaired, {len(after.requests)} requests are whole")
    elif not before.problems:
        click.echo(f"{before.device}: sound, {len(before.requests)} requests")


def _paths(devices: tuple[str, ...], name: str | None) -> tuple[str, ...]:
    if devices:
        return devices
    from emu.provision.testbed import Testbed

    return Testbed.find(name).devices


def _inspect(devices: tuple[str, ...], name: str | None) -> list[Inspection]:
    from emu.pool.inspect import inspect

    return [inspect(path) for path in _paths(devices, name)]
