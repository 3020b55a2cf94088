"""`emu env`: the environment that a testbed's programs get."""

from __future__ import annotations

import shlex

import click

from emu.cli.common import json_option, name_option, print_json
from emu.errors import UserError
from emu.suggest import did_you_mean


@click.command("env")
@click.argument("host", required=False)
@click.option(
    "--for", "program", metavar="mooncake|lmcache|ucx", help="Also what this program reads."
)
@name_option
@json_option
def command(host: str | None, program: str | None, name: str | None, as_json: bool) -> None:
    """Print export lines for HOST (the first one by default): eval "$(emu env)"."""
    from emu.provision.client_env import PROGRAMS, client_env
    from emu.provision.rdma_port import rdma_port
    from emu.provision.testbed import Testbed

    if program is not None and program not in PROGRAMS:
        raise UserError(f"--for: no {program!r}", remedy=did_you_mean(program, PROGRAMS))
    testbed = Testbed.find(name)
    host = host or testbed.hosts[0]
    env = testbed.env(host)
    if program is not None:
        env |= client_env(program, testbed.regions, rdma_port(testbed, host))
    if as_json:
        print_json({"env": env})
    else:
        for key, value in env.items():
            click.echo(f"export {key}={shlex.quote(value)}")
