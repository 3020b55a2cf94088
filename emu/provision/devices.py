"""The devices of a running guest: what they are now, and changing their mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emu.errors import TestbedError, UserError
from emu.guest.session import ask

if TYPE_CHECKING:
    from emu.guest.guest import Guest
    from emu.provision.testbed import Testbed

MODE_TIMEOUT_S = 120.0


def guest_of(testbed: Testbed, host: str) -> Guest:
    """The guest that is this host.

    Raises:
        UserError: no such host.
        TestbedError: its hosts are no guests.
    """
    testbed.env(host)  # refuses an unknown host with the closest name
    guest = testbed.guest(host)
    if guest is None:
        raise TestbedError(
            f"the hosts of testbed {testbed.name!r} are groups of processes, not guests",
            name=testbed.name,
            remedy="make one with `emu up --driver qemu`",
        )
    return guest


def device_number(testbed: Testbed, device: str) -> int:
    """Number of the device "cxlN".

    Raises:
        UserError: there is no such device.
    """
    known = [f"cxl{number}" for number in range(len(testbed.record.devices))]
    if device not in known:
        raise UserError(
            f"testbed {testbed.name!r} has no device {device!r}",
            remedy=f"it has {known[0]} to {known[-1]}" if len(known) > 1 else f"it has {known[0]}",
        )
    return known.index(device)


def devices_of(testbed: Testbed, host: str) -> list[dict[str, Any]]:
    """Each region of a guest as it is: names and serials of its devices, path, size_bytes, mode, NUMA node.

    Raises:
        UserError, TestbedError, GuestSilent: see guest_of; the guest does not answer.
    """
    guest = guest_of(testbed, host)
    answer = ask(guest.directory, guest.ports, do="devices")
    by_serial = {d.serial: f"cxl{number}" for number, d in enumerate(testbed.record.devices)}
    return [{"names": [by_serial[s] for s in r["serials"]], **r} for r in answer["devices"]]


def set_mode(testbed: Testbed, host: str, device: str, mode: str) -> dict[str, Any]:
    """Make the region that a device belongs to "devdax" or "system-ram".

    Raises:
        UserError: no such host or device, or its memory is in use; says by what.
        TestbedError, GuestSilent: see guest_of; the guest does not answer.
    """
    guest = guest_of(testbed, host)
    serial = testbed.record.devices[device_number(testbed, device)].serial
    request = {"do": "mode", "serial": serial, "mode": mode}
    answer = ask(guest.directory, guest.ports, timeout_s=MODE_TIMEOUT_S, **request)
    row: dict[str, Any] = answer["device"]
    return row
