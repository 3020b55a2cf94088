"""Character devices of the kernel's device-dax driver (/dev/daxN.M)."""

from __future__ import annotations

import os
from pathlib import Path

SYSFS = Path("/sys/dev/char")


def devdax_bytes(status: os.stat_result, sysfs: Path = SYSFS) -> int | None:
    """Size of a character device, None where it is no devdax; touching memory past it is a SIGBUS.

    Args:
        status: of the device.
        sysfs: folder of the links MAJOR:MINOR.

    Raises:
        OSError, ValueError: it is one, but its size cannot be read.
    """
    device = sysfs / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if (device / "subsystem").resolve().name != "dax":
        return None
    return int((device / "size").read_text(), 0)


def devdax_align_bytes(status: os.stat_result, sysfs: Path = SYSFS) -> int:
    """What lengths and offsets of a mapping of that devdax device are multiples of.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    device = sysfs / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return int((device / "align").read_text(), 0)
