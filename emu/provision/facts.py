"""What a plan depends on, read from the machine; nothing is changed here."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emu.provision.guest_facts import gather_guest_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from emu.errors import HostError
    from emu.provision.guest_facts import GuestFacts
    from emu.provision.spec import TestbedSpec

MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}
SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What an existing device's path is.

    Attributes:
        kind: "file", "devdax" or "other"; "missing" when nothing is there.
        size_bytes: its size.
        usable: readable and writable by this user.
    """

    kind: str
    size_bytes: int = 0
    usable: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine, as far as a plan depends on it.

    Attributes:
        python: the interpreter that started us.
        root: directory that holds the run directories.
        root_is_default: ours to make and remove, not given by --dir.
        root_exists: it is there, a directory.
        run_dir_exists: something is where the run directory would be.
        memory_backed: files below root occupy memory (tmpfs).
        file_system: where root is mounted.
        fs_free_bytes: what root's file system can still take.
        free_memory_bytes: MemAvailable.
        cgroup_free_bytes: what the tightest memory cgroup still allows, None without a limit.
        page_bytes: the page size.
        testbeds: names that are taken.
        paths: facts about the spec's device paths.
        guests: what guests can run on, or why they cannot; None where nobody asks for guests.
    """

    python: str
    root: str
    root_is_default: bool
    root_exists: bool
    run_dir_exists: bool
    memory_backed: bool
    file_system: str
    fs_free_bytes: int
    free_memory_bytes: int
    cgroup_free_bytes: int | None
    page_bytes: int
    testbeds: frozenset[str]
    paths: Mapping[str, PathFacts]
    guests: GuestFacts | HostError | None = None


def default_root() -> Path:
    """Where run directories lie without --dir."""
    return SHM / f"emu-{os.getuid()}"


def gather_facts(spec: TestbedSpec, directory: Path | None, testbeds: Iterable[str]) -> Facts:
    """The facts for this spec.

    Args:
        spec: what is wanted.
        directory: --dir, None for the default.
        testbeds: names that are taken.
    """
    root = default_root() if directory is None else directory.absolute()
    existing = root if root.is_dir() else root.parent
    mount_point, file_system = mount_of(existing)
    return Facts(
        python=sys.executable,
        root=str(root),
        root_is_default=directory is None,
        root_exists=root.is_dir(),
        run_dir_exists=os.path.lexists(root / spec.name),
        memory_backed=file_system in MEMORY_FILE_SYSTEMS,
        file_system=mount_point,
        fs_free_bytes=free_bytes(existing),
        free_memory_bytes=available_memory_bytes(),
        cgroup_free_bytes=cgroup_free_bytes(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        testbeds=frozenset(testbeds),
        paths={
            device.path: path_facts(Path(device.path)) for device in spec.devices if device.path
        },
        guests=None if spec.driver == "local" else gather_guest_facts(),
    )


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


def free_bytes(path: Path) -> int:
    """What an ordinary user can still write on this path's file system; 0 where the path is missing."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable: what can be allocated without swapping."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def cgroup_free_bytes(
    cgroup_file: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the tightest memory cgroup around this process still allows, None without a limit (v1 and v2)."""
    free: list[int] = []
    for line in cgroup_file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _free_along(mount, path, "memory.max", "memory.current", "inactive_file")
            unified = mount / "unified"
            free += _free_along(unified, path, "memory.max", "memory.current", "inactive_file")
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
        if maximum < 1 << 60:  # v1 writes a number near 2**63 for "no limit"
            found.append(max(0, maximum - used + int(counters.get(reclaimable, 0))))
    return found


def path_facts(path: Path) -> PathFacts:
    """What an existing device's path is, and how large."""
    try:
        found = path.stat()
    except OSError:
        return PathFacts("missing")
    usable = os.access(path, os.R_OK | os.W_OK)
    if stat.S_ISREG(found.st_mode):
        return PathFacts("file", found.st_size, usable)
    size = Path(f"/sys/dev/char/{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}/size")
    if stat.S_ISCHR(found.st_mode) and size.exists():
        return PathFacts("devdax", int(size.read_text()), usable)
    return PathFacts("other")
