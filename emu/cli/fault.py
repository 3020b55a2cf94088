"""`emu fault`: break something of a running testbed."""

from __future__ import annotations

import click

from emu.cli.common import name_option


@click.group("fault")
def command() -> None:
    """Break something of a testbed of guests, as QEMU breaks the emulated hardware."""


@command.command("remove")
@click.argument("device")
@click.option("--host", help="The guest. [default: the first one]")
@name_option
def remove(device: str, host: str | None, name: str | None) -> None:
    """Pull DEVICE (cxl0, cxl1, ...) out of a guest; the pool and the other guests keep it."""
    from emu.provision.faults import remove_device
    from emu.provision.testbed import Testbed

    testbed = Testbed.find(name)
    remove_device(testbed, host or testbed.hosts[0], device)


@command.command("link-down")
@click.argument("host")
@name_option
def link_down(host: str, name: str | None) -> None:
    """Take the network link of HOST down: its soft-RoCE port goes down, too."""
    _set_link(host, name, up=False)


@command.command("link-up")
@click.argument("host")
@name_option
def link_up(host: str, name: str | None) -> None:
    """Bring the network link of HOST up again."""
    _set_link(host, name, up=True)


def _set_link(host: str, name: str | None, *, up: bool) -> None:
    from emu.provision.faults import set_link
    from emu.provision.testbed import Testbed

    set_link(Testbed.find(name), host, up=up)


@command.command("kill")
@click.argument("host")
@name_option
def kill(host: str, name: str | None) -> None:
    """End HOST as a power cut does; what it wrote to the pool stays."""
    from emu.provision.faults import kill_host
    from emu.provision.testbed import Testbed

    kill_host(Testbed.find(name), host)
