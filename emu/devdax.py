"""Devices as files: what tells one from another, and the size of a devdax (/dev/daxN.M)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

SYSFS = Path("/sys/dev/char")


def identity(status: os.stat_result) -> tuple[str, int, int]:
    """What is equal for two names of one device: paths, links, bind mounts, other nodes of one character device."""
    if stat.S_ISCHR(status.st_mode):
        return "character", os.major(status.st_rdev), os.minor(status.st_rdev)
    return "file", status.st_dev, status.st_ino


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
