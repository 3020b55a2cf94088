"""What a plan depends on, read from the machine; nothing is changed here."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emu.devdax import devdax_bytes, identity
from emu.host_memory import MEMORY_FILE_SYSTEMS, available_bytes, cgroup_free_bytes, mount_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from emu.provision.spec import TestbedSpec

SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What an existing device's path is.

    Attributes:
        kind: "file", "devdax" or "other"; "missing" when nothing is there.
        size_bytes: its size.
        usable: readable and writable by this user.
        identity: equal for two names of one device; None when nothing is there.
    """

    kind: str
    size_bytes: int = 0
    usable: bool = False
    identity: tuple[str, int, int] | None = None


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
        free_memory_bytes=available_bytes(),
        cgroup_free_bytes=cgroup_free_bytes(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        testbeds=frozenset(testbeds),
        paths={
            device.path: path_facts(Path(device.path)) for device in spec.devices if device.path
        },
    )


def free_bytes(path: Path) -> int:
    """What an ordinary user can still write on this path's file system; 0 where the path is missing."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def path_facts(path: Path) -> PathFacts:
    """What an existing device's path is, and how large."""
    try:
        found = path.stat()
    except OSError:
        return PathFacts("missing")
    usable = os.access(path, os.R_OK | os.W_OK)
    if stat.S_ISREG(found.st_mode):
        return PathFacts("file", found.st_size, usable, identity(found))
    size_bytes = None
    if stat.S_ISCHR(found.st_mode):
        with suppress(OSError, ValueError):
            size_bytes = devdax_bytes(found)
    if size_bytes is None:
        return PathFacts("other")
    return PathFacts("devdax", size_bytes, usable, identity(found))
