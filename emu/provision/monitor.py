"""QEMU's monitor: what a fault needs from it, by the QMP library of the QEMU project."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from emu.errors import EmuError, TestbedError
from emu.provision.guests import qmp_socket

if TYPE_CHECKING:
    from emu.guest.guest import Guest

TIMEOUT_S = 60.0


class Refused(EmuError):
    """QEMU does not do it."""


def execute(guest: Guest, command: str, **arguments: Any) -> Any:
    """Let a guest's QEMU do one command.

    Raises:
        Refused: it does not; carries QEMU's words.
        TestbedError: QEMU does not answer.
    """
    try:
        return asyncio.run(asyncio.wait_for(_execute(guest, command, arguments), TIMEOUT_S))
    except (OSError, TimeoutError, EOFError) as error:
        raise TestbedError(
            f"the QEMU of {guest.host} does not answer: {error}", remedy="see `emu status`"
        ) from error


async def _execute(guest: Guest, command: str, arguments: dict[str, Any]) -> Any:
    from qemu.qmp import ExecuteError, QMPClient, QMPError

    client = QMPClient("emu")
    try:
        await client.connect(qmp_socket(guest.directory))
        try:
            return await client.execute(command, arguments or None)
        finally:
            await client.disconnect()
    except ExecuteError as error:
        raise Refused(f"QEMU refuses {command}: {error}") from error
    except QMPError as error:
        raise OSError(str(error)) from error
