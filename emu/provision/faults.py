"""Faults of a running testbed of guests: a device pulled, a link down, a host's power gone.

Each is done by QEMU to the emulated hardware, so that the guest's kernel meets what it would meet on real machines.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from emu.errors import TestbedError
from emu.provision import monitor, process
from emu.provision.devices import device_number, devices_of, guest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.provision.testbed import Testbed

REMOVE_TIMEOUT_S = 60.0


def set_link(testbed: Testbed, host: str, *, up: bool) -> None:
    """Take a guest's network link down or up; its soft-RoCE port follows.

    Raises:
        UserError, TestbedError: no such guest; QEMU does not answer.
    """
    monitor.execute(guest_of(testbed, host), "set_link", name="nic0", up=up)


def kill_host(testbed: Testbed, host: str) -> None:
    """End a guest as a power cut does; what it wrote to the pool stays.

    Raises:
        UserError, TestbedError: no such guest, or it is dead already.
    """
    guest_of(testbed, host)
    role = f"qemu {host}"
    entry = next((p for p in testbed.state.load(testbed.name).processes if p.role == role), None)
    if entry is None or not process.is_running(entry.process):
        raise TestbedError(f"{host} is not running", name=testbed.name, remedy="see `emu status`")
    process.terminate([entry.process], grace_s=0.0)


def remove_device(testbed: Testbed, host: str, device: str) -> None:
    """Pull a device out of a guest; its region goes, the pool's file and the other guests keep it.

    Raises:
        UserError, TestbedError: no such guest or device; the guest does not let go of it.
    """
    guest = guest_of(testbed, host)
    number = device_number(testbed, device)
    monitor.execute(guest, "device_del", id=f"cxl{number}")
    serial = testbed.record.devices[number].serial

    def removed() -> bool:
        rows = devices_of(testbed, host)
        return all(row["mode"] == "removed" for row in rows if serial in row["serials"])

    _wait(removed, f"{host} does not let go of {device}; is its memory in use?", testbed.name)


def _wait(done: Callable[[], bool], words: str, name: str) -> None:
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise TestbedError(f"{words} (waited {REMOVE_TIMEOUT_S:.0f} s)", name=name)
        time.sleep(0.2)
