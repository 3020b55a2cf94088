"""Starts guests and waits for them: one that hangs while it boots is ended and started again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import EmuError, TestbedError, WorkerError
from emu.guest import session
from emu.provision import launch, process
from emu.provision.guests import MTU, PREFIX_BITS
from emu.provision.state import ProcessRecord
from emu.provision.steps import StartGuest

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.provision.state import Record
    from emu.provision.steps import SetUpGuest

ATTEMPTS = 3
BOOT_TIMEOUT_S = 300.0
SILENCE_TIMEOUT_S = 90.0
"""How long a booting guest's console may stay silent; a busy machine stretches 5 s to 30 s."""
STALL_MARKS = (b"detected stalls", b"soft lockup", b"KVM internal error", b"Kernel panic")


def start(record: Record, step: StartGuest, save: Callable[[], None]) -> None:
    """Start a guest's QEMU and record it."""
    started = launch.start(step.argv, Path(step.log), {process.TAG: record.id})
    record.processes.append(ProcessRecord(started, step.role, host=""))
    save()


def set_up(record: Record, step: SetUpGuest, save: Callable[[], None]) -> None:
    """Wait until the guest's agent answers, then let it make regions, devices and the network.

    Raises:
        WorkerError: QEMU ended, or the guest hung ATTEMPTS times; carries the console's last lines.
        TestbedError: the guest refuses the set-up.
    """
    starting = _start_of(record, step.host)
    for attempt in range(1, ATTEMPTS + 1):
        trouble = _wait(record, step, starting)
        if not trouble:
            break
        if attempt == ATTEMPTS:
            raise _error(starting, f"{trouble}, {ATTEMPTS} times")
        _end(record, starting.role)
        with Path(starting.log).open("ab") as log:
            log.write(f"\nemu: {trouble}; started again\n".encode())
        start(record, starting, save)
    try:
        answer = session.ask(
            step.directory,
            step.ports,
            timeout_s=120.0,
            do="setup",
            host=step.host,
            regions=step.regions,
            network={
                "mac": step.mac,
                "address": step.address,
                "prefix_bits": PREFIX_BITS,
                "mtu": MTU,
                "peers": dict(peer.split("=") for peer in step.peers),
                "rxe": step.rxe,
            },
        )
    except EmuError as error:
        raise TestbedError(
            f"{step.host} cannot be set up: {error.message}",
            name=record.name,
            remedy=error.remedy or f"see the console's last lines: {_tail(starting)}",
        ) from error
    found = [row["serials"] for row in answer["devices"] if row["path"]]
    if found != [list(region) for region in step.regions]:
        raise TestbedError(f"{step.host} has the regions {found}", name=record.name)


def _start_of(record: Record, host: str) -> StartGuest:
    for entry in record.steps:
        if isinstance(entry.step, StartGuest) and entry.step.host == host:
            return entry.step
    raise AssertionError(f"no step starts {host}")


def _wait(record: Record, step: SetUpGuest, starting: StartGuest) -> str:
    """ "" once the agent answers, else how the guest hangs.

    Raises:
        WorkerError: QEMU ended.
    """
    qemu = _process(record, starting.role)
    console = Path(starting.log)
    begin = heard = time.monotonic()
    size = console.stat().st_size
    earlier = size
    while True:
        try:
            session.ask(step.directory, step.ports, timeout_s=2.0, do="ping")
        except EmuError:
            if not process.is_running(qemu):
                raise _error(starting, "QEMU ended") from None
        else:
            return ""
        now = time.monotonic()
        if console.stat().st_size != size:
            size, heard = console.stat().st_size, now
        if any(mark in console.read_bytes()[earlier:] for mark in STALL_MARKS):
            return "the guest's kernel stalled"
        if now - heard > SILENCE_TIMEOUT_S or now - begin > BOOT_TIMEOUT_S:
            return f"the guest's agent did not answer in {now - begin:.0f} s"
        time.sleep(0.05)


def _process(record: Record, role: str) -> process.ProcessId:
    return next(entry.process for entry in reversed(record.processes) if entry.role == role)


def _end(record: Record, role: str) -> None:
    process.terminate([_process(record, role)], grace_s=1.0)
    record.processes = [entry for entry in record.processes if entry.role != role]


def _error(starting: StartGuest, what: str) -> WorkerError:
    tail = _tail(starting)
    return WorkerError(
        f"{starting.host}: {what}: {tail.splitlines()[-1] if tail else 'it wrote nothing'}",
        role=starting.role,
        log_tail=tail,
        remedy="see `emu doctor`, or use --driver local",
    )


def _tail(starting: StartGuest) -> str:
    return Path(starting.log).read_bytes()[-2000:].decode(errors="replace").strip()
