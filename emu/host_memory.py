"""How much memory this process may still take, which files occupy memory, and the refusal of what does not fit."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from emu.errors import HostError
from emu.units import format_size

MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}
_V1_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def available_bytes() -> int:
    """MemAvailable: what this machine can allocate without swapping, whatever a container's limit."""
    return int(psutil.virtual_memory().available)


def free_bytes() -> int:
    """What this process can still allocate: the machine's memory, or what the memory cgroups leave of it."""
    limit = cgroup_free_bytes()
    available = available_bytes()
    return available if limit is None else min(available, limit)


def require_free(nbytes: int, what: str, *, remedy: str = "") -> None:
    """Refuse an allocation that does not fit.

    Args:
        nbytes: to be allocated.
        what: what needs them, for the message.
        remedy: the way out; without it, a general one.

    Raises:
        HostError: with the numbers.
    """
    free = free_bytes()
    if nbytes > free:
        raise HostError(
            f"{what} needs {format_size(nbytes)}, but only {format_size(free)} of memory are free",
            capability="memory",
            remedy=remedy
            or "make it smaller, stop other programs, or raise the container's memory limit",
        )


def cgroup_free_bytes(
    cgroup_file: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the tightest memory cgroup around this process still allows, None without a limit (v1 and v2)."""
    free: list[int] = []
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:  # a kernel without cgroups
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (mount, mount / "unified"):
                free += _free_along(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free += _free_along(mount / "memory", path, *names)
    return min(free, default=None)


def _free_along(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Free bytes of a cgroup and its ancestors; in a container the path may be the host's, so the root counts."""
    found = []
    directory = root / path.lstrip("/")
    for group in (directory, *directory.parents):
        if group != root and root not in group.parents:
            break
        try:
            maximum = int((group / limit).read_text())
            used = int((group / usage).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # not there, or "max": no limit at this level
            continue
        counters = dict(line.split() for line in lines)
        if maximum < _V1_UNLIMITED_BYTES:
            # The kernel drops file pages before it refuses an allocation.
            found.append(max(0, maximum - used + int(counters.get(reclaimable, 0))))
    return found


def mount_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> tuple[str, str]:
    """(mount point, file system type) of an existing path, by proc_pid_mountinfo(5)."""
    best = ("/", "unknown")
    real = path.resolve()
    for line in mountinfo.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        escaped = before.split()[4]  # blanks and backslashes are written as \ooo
        raw = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), escaped)
        point = os.fsdecode(raw)
        if (real == Path(point) or Path(point) in real.parents) and len(point) >= len(best[0]):
            best = (point, os.fsdecode(after.split()[0]))
    return best


def occupies_memory(path: Path) -> bool:
    """Whether the file at this path, or one to be made there, lies in memory (tmpfs) and not on a disk."""
    return mount_of(path)[1] in MEMORY_FILE_SYSTEMS
