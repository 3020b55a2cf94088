"""Code that maps a device itself: in this process, in processes of two hosts, and in a guest with a real /dev/dax."""

import sys
from pathlib import Path

import pytest
from device_log import DeviceLog

PROGRAM = str(Path(__file__).parents[1] / "device_log.py")


def open_log(path):
    return DeviceLog(str(path), path.stat().st_size)


def test_a_fresh_device_holds_no_records(cxl_devices):
    assert open_log(cxl_devices[0]).records() == []


@pytest.mark.emu(cxl_devices=2)
def test_each_device_has_its_own_records(cxl_devices):
    first, second = map(open_log, cxl_devices)
    first.append(b"one")
    first.append(b"two" * 100)
    second.append(b"elsewhere")
    assert open_log(cxl_devices[0]).records() == [b"one", b"two" * 100]
    assert open_log(cxl_devices[1]).records() == [b"elsewhere"]


def test_a_torn_record_is_not_read(cxl_devices):
    log = open_log(cxl_devices[0])
    log.append(b"whole")
    log.append(b"torn")
    with cxl_devices[0].open("r+b") as device:
        device.seek(64 + 8)
        device.write(b"T")
    assert log.records() == [b"whole"]


def python(testbed, host, *arguments):
    size = testbed.regions[0][1]
    device = testbed.env(host)["EMU_CXL_DEVICES"]
    verb, *text = arguments
    argv = [sys.executable, "-I", PROGRAM, verb, device, *text]
    done = testbed.exec(host, argv, env={"DEVICE_BYTES": str(size)}, timeout_s=300)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.mark.emu(hosts=2)
def test_what_one_host_appends_the_other_reads(emu_testbed):
    python(emu_testbed, "host0", "append", "from host0")
    python(emu_testbed, "host1", "append", "from host1")
    assert python(emu_testbed, "host0", "print") == ["from host0", "from host1"]


@pytest.mark.emu(driver="qemu", device_size="256M")
def test_a_guest_with_a_real_cxl_device(emu_testbed, cxl_devices):
    """Skipped where there are no guests; CI forbids that by --emu-need."""
    assert emu_testbed.env("host0")["EMU_CXL_DEVICES"] == "/dev/dax0.0"
    python(emu_testbed, "host0", "append", "by the guest's kernel")
    assert open_log(cxl_devices[0]).records() == [b"by the guest's kernel"]
