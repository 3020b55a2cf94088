"""`emu env`: the environment that a testbed's programs get."""

from __future__ import annotations

import shlex

import click

from emu.cli.common import json_option, name_option, print_json


@click.command("env")
@click.argument("host", required=False)
@name_option
@json_option
def command(host: str | None, name: str | None, as_json: bool) -> None:
    """Print export lines for HOST (the first one by default): eval "$(emu env)"."""
    from emu.provision.testbed import Testbed

    testbed = Testbed.find(name)
    env = testbed.env(host or testbed.hosts[0])
    if as_json:
        print_json({"env": env})
    else:
        for key, value in env.items():
            click.echo(f"export {key}={shlex.quote(value)}")
