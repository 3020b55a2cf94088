"""`emu down`: take a testbed down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, progress

if TYPE_CHECKING:
    from emu.provision.state import StateDirectory


@click.command("down")
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="All testbeds of this user.")
@click.option("--dry-run", is_flag=True, help="Say what remains and would go, do nothing.")
@json_option
def command(name: str | None, every: bool, dry_run: bool, as_json: bool) -> None:
    """Take a testbed down: end its processes and remove what `emu up` made, nothing else."""
    from emu.errors import EmuError
    from emu.provision.state import StateDirectory
    from emu.provision.testbed import resolve_name

    if every and name:
        raise click.UsageError("give NAME or --all, not both")
    state = StateDirectory()
    if not dry_run:
        state.remove_stale_locks()
    rows, failures = [], []
    for each in state.names() if every else [resolve_name(name, state)]:
        try:
            rows.append(_preview(state, each) if dry_run else _down(state, each))
        except EmuError as error:
            if not every:
                raise
            failures.append(error)
    if as_json:
        print_json({"dry_run": dry_run, "testbeds": rows})
    else:
        _print(rows, dry_run=dry_run)
    if failures:
        raise EmuError("; ".join(map(str, failures)))


def _down(state: StateDirectory, name: str) -> dict[str, Any]:
    from emu.provision.runner import Runner

    undone = Runner(state, progress).down(name)
    return {"name": name, "ended": undone.ended, "removed": undone.removed, "left": undone.left}


def _preview(state: StateDirectory, name: str) -> dict[str, Any]:
    from emu.provision.condition import inspect

    found = inspect(state, name)
    ended = [row["pid"] for row in found.processes]
    return {"name": name, "ended": ended, "removed": list(found.remains), "left": []}


def _print(rows: list[dict[str, Any]], *, dry_run: bool) -> None:
    if not rows:
        click.echo("no testbed")
    for row in rows:
        if dry_run:
            for what in [*(f"process {pid}" for pid in row["ended"]), *row["removed"]]:
                click.echo(f"{row['name']}: would go: {what}")
            continue
        pids = f" (pid {', '.join(map(str, row['ended']))})" if row["ended"] else ""
        click.echo(
            f"{row['name']} is down; {len(row['removed'])} files removed, "
            f"{len(row['ended'])} process{'' if len(row['ended']) == 1 else 'es'} ended{pids}"
        )
        for line in row["left"]:
            click.echo(f"{row['name']}: left {line}")
