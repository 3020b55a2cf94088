"""Guests of other shapes, and what kill -9 leaves: up to 8 devices, a switch, an interleave; nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import emu
from emu.errors import TestbedError, UserError, WorkerError
from emu.provision import boot, process
from emu.provision.condition import inspect
from emu.provision.devices import devices_of
from emu.provision.facts import gather_facts
from emu.provision.plan import make_plan
from emu.provision.runner import Runner
from emu.provision.spec import Flags, make_spec
from emu.provision.state import StateDirectory
from emu.provision.steps import StartGuest
from emu.provision.testbed import Testbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Home

    from emu.provision.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.needs("qemu", "cxl_type3", "guest_kernel")]

MIB = 1 << 20


def nothing_left(home: Home) -> None:
    assert list(home.run.iterdir()) == []
    assert StateDirectory().names() == []
    assert [pid for pid in process._pids() if str(home.run).encode() in _command(pid)] == []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def qemu_of(name: str, host: str = "host0") -> process.ProcessId:
    record = StateDirectory().load(name)
    return next(p.process for p in record.processes if p.role == f"qemu {host}")


SHAPES = [
    pytest.param(8, {}, id="eight on two host bridges"),
    pytest.param(4, {"topology": "switch"}, id="four behind a switch"),
]


@pytest.mark.parametrize(("count", "flags"), SHAPES)
def test_every_device_is_its_own_file(
    guest_home: Home, count: int, flags: dict[str, object]
) -> None:
    with emu.testbed(count, driver="qemu", directory=guest_home.run, **flags) as bed:
        for number, path in enumerate(bed.devices):
            with Path(path).open("r+b") as device:
                device.write(b"device %02d" % number)
        read = (
            "import mmap, os\n"
            "for path in os.environ['EMU_CXL_DEVICES'].split(':'):\n"
            "    print(mmap.mmap(os.open(path, os.O_RDWR), 2 << 20)[:9].decode())\n"
        )
        done = bed.exec("host0", [sys.executable, "-I", "-S", "-c", read], timeout_s=120)
        assert done.stdout.decode().splitlines() == [f"device {n:02d}" for n in range(count)]
        assert len({row["node"] for row in devices_of(bed, "host0")}) == count
    nothing_left(guest_home)


def test_an_interleaved_region_goes_over_all_devices(guest_home: Home) -> None:
    with emu.testbed(4, driver="qemu", directory=guest_home.run, interleave=4, rdma="off") as bed:
        for number, path in enumerate(bed.devices):
            with Path(path).open("r+b") as device:
                device.write(bytes([number + 1]) * 256)
        (row,) = devices_of(bed, "host0")
        assert (row["names"], row["size_bytes"]) == (["cxl0", "cxl1", "cxl2", "cxl3"], 1024 * MIB)
        read = "import mmap, os; print(mmap.mmap(os.open('/dev/dax0.0', os.O_RDWR), 2 << 20)[:1024].hex())"
        done = bed.exec("host0", [sys.executable, "-I", "-S", "-c", read], timeout_s=120)
        wanted = b"".join(bytes([number]) * 256 for number in (1, 2, 3, 4))
        assert bytes.fromhex(done.stdout.decode()) == wanted


def test_a_killed_qemu_is_seen_and_down_removes_the_rest_but_no_other_testbed(
    guest_home: Home,
) -> None:
    with emu.testbed(1, driver="local", name="other", device_size="1M", directory=guest_home.run):
        with emu.testbed(1, driver="qemu", name="g", directory=guest_home.run) as bed:
            found = qemu_of("g")
            os.kill(found.pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while process.is_running(found):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            condition = inspect(StateDirectory(), "g")
            assert condition.state == "damaged"
            assert "process qemu host0" in condition.missing
            done = bed.exec("host0", ["true"], timeout_s=60)
            assert (done.returncode, b"the guest is gone" in done.stderr) == (127, True)
        assert not (guest_home.run / "g").exists()
        assert inspect(StateDirectory(), "other").state == "up"
    nothing_left(guest_home)


def _up(home: Home) -> subprocess.Popen[bytes]:
    code = "import sys; from emu.cli import main; main()"
    flags = ["up", "--cxl-devices", "1", "--driver", "qemu", "--name", "g", "--dir", str(home.run)]
    return subprocess.Popen([sys.executable, "-c", code, *flags], stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("delay_s", [0.3, 3.0])
def test_a_killed_up_leaves_nothing_after_down(guest_home: Home, delay_s: float) -> None:
    """Killed as soon as QEMU runs, and some seconds into its boot."""
    with _up(guest_home) as child:
        deadline = time.monotonic() + 60
        while not any(
            b"qemu-system" in _command(pid) and str(guest_home.run).encode() in _command(pid)
            for pid in process._pids()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(delay_s)
        child.kill()
    assert inspect(StateDirectory(), "g").state == "incomplete"
    Runner(StateDirectory()).down("g")
    nothing_left(guest_home)


def test_a_guest_that_does_not_boot_is_one_error_with_the_console_and_leaves_nothing(
    guest_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that stays silent: the watchdog starts it again, then says what the console said."""
    monkeypatch.setattr(boot, "SILENCE_TIMEOUT_S", 0.3)
    plan = _plan_with_qemu(guest_home, lambda _: ("/bin/sleep", "4715"))
    with pytest.raises(WorkerError, match=r"host0: the guest's agent did not answer .*, 3 times"):
        Runner(StateDirectory()).up(plan)
    nothing_left(guest_home)


def _plan_with_qemu(home: Home, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Plan:
    """A plan for one guest "g" whose QEMU command is changed."""
    spec = make_spec(Flags(cxl_devices=1, driver="qemu", name="g", rdma="off"))
    plan = make_plan(spec, gather_facts(spec, home.run, {}))
    steps = tuple(
        replace(step, argv=change(step.argv)) if isinstance(step, StartGuest) else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


def test_a_guest_that_hangs_once_is_started_again_and_works(
    guest_home: Home, tmp_path: Path
) -> None:
    """In place of QEMU, at its first start, a program that says what a stalled kernel says and stays."""
    stall = tmp_path / "qemu"
    stall.write_text(
        f"#!/bin/sh\nif mkdir {tmp_path}/first 2>/dev/null; then\n"
        "  echo 'rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:'\n  exec sleep 4714\nfi\n"
        'shift\nexec "$@"\n'
    )
    plan = _plan_with_qemu(guest_home, lambda argv: ("/bin/sh", str(stall), "again", *argv))
    Runner(StateDirectory()).up(plan)
    bed = Testbed.find("g")
    assert bed.exec("host0", ["echo", "here"], timeout_s=60).stdout == b"here\n"
    console = (guest_home.run / "g" / "host0-console.log").read_text(errors="replace")
    assert console.count("emu: the guest's kernel stalled; started again") == 1
    assert b"sleep\x004714" not in b"".join(_command(pid) for pid in process._pids())
    Runner(StateDirectory()).down("g")
    nothing_left(guest_home)


def test_qemus_own_words_reach_the_user(guest_home: Home) -> None:
    plan = _plan_with_qemu(guest_home, lambda argv: (*argv, "-device", "no-such-device"))
    with pytest.raises(WorkerError, match=r"QEMU ended.*'no-such-device' is not a valid device"):
        Runner(StateDirectory()).up(plan)
    nothing_left(guest_home)


def test_sizes_that_cxl_cannot_have_are_refused_before_anything_is_made(guest_home: Home) -> None:
    with (
        pytest.raises(UserError, match="multiples of 256M"),
        emu.testbed(1, driver="qemu", device_size="100M", directory=guest_home.run),
    ):
        pytest.fail("made")
    nothing_left(guest_home)


def test_auto_takes_guests_where_they_can_be_had(guest_home: Home) -> None:
    for flags, driver, words in (
        (Flags(cxl_devices=2), "qemu", "QEMU"),
        (Flags(cxl_devices=2, device_size="1M"), "local", "multiples of 256M"),
        (Flags(cxl_devices=2, rdma="node"), "local", "memory node"),
    ):
        spec = make_spec(flags)
        plan = make_plan(spec, gather_facts(spec, guest_home.run, {}))
        assert (plan.driver, words in plan.reason) == (driver, True), plan.reason


def test_the_local_driver_has_no_modes(guest_home: Home) -> None:
    with (
        emu.testbed(1, driver="local", device_size="1M", directory=guest_home.run) as bed,
        pytest.raises(TestbedError, match="groups of processes"),
    ):
        devices_of(Testbed.find(bed.name), "host0")
