"""`emu mode`: devdax or system-ram, for a device of a guest."""

from __future__ import annotations

import click

from emu.cli.common import json_option, name_option, print_json, print_table


@click.command("mode")
@click.argument("device", metavar="[DEVICE]", required=False)
@click.argument("mode", metavar="[devdax|system-ram]", required=False)
@click.option("--host", help="The guest. [default: the first one]")
@name_option
@json_option
def command(
    device: str | None, mode: str | None, host: str | None, name: str | None, as_json: bool
) -> None:
    """Show the modes of a guest's devices, or make DEVICE (cxl0, cxl1, ...) devdax or system-ram.

    A devdax device is /dev/daxN.0; as system-ram it is the memory of a NUMA node of its own.
    """
    from emu.errors import UserError
    from emu.provision.devices import devices_of, set_mode
    from emu.provision.testbed import Testbed

    testbed = Testbed.find(name)
    where = host or testbed.hosts[0]
    if device is not None:
        if mode not in {"devdax", "system-ram"}:
            raise UserError(f"no mode {mode!r}", remedy="use devdax or system-ram")
        set_mode(testbed, where, device, mode)
    rows = devices_of(testbed, where)
    if as_json:
        print_json({"host": where, "devices": rows})
    else:
        cells = [(",".join(r["names"]), r["mode"], r["path"] or "-", r["node"]) for r in rows]
        print_table(("device", "mode", "path", "node"), cells)
