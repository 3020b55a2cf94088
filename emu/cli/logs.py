"""`emu logs`: what a host's processes wrote."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from emu.cli.common import name_option


@click.command("logs")
@click.argument("host", required=False)
@name_option
def command(host: str | None, name: str | None) -> None:
    """Print the log of HOST, "HOST-console", "network" or "memory-node"; without it, all logs."""
    from emu.errors import TestbedError, UserError
    from emu.provision.plan import log_path
    from emu.provision.state import StateDirectory
    from emu.provision.testbed import resolve_name
    from emu.suggest import did_you_mean

    state = StateDirectory()
    record = state.load(resolve_name(name, state))
    roles = [*record.hosts, *(["memory-node"] if record.node_socket else [])]
    if record.guests:
        roles += [*(f"{guest.host}-console" for guest in record.guests), "network"]
    if host is not None and host not in roles:
        raise UserError(
            f"testbed {record.name!r} has no host {host!r}", remedy=did_you_mean(host, roles)
        )
    for role in roles if host is None else [host]:
        path = Path(log_path(record.run_dir, role))
        if host is None:
            click.echo(f"==> {role} <==")
        try:
            with path.open("rb") as log:
                sys.stdout.flush()
                shutil.copyfileobj(log, sys.stdout.buffer)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise TestbedError(
                f"{path}: {error.strerror}", name=record.name, remedy=f"emu status {record.name}"
            ) from error
