"""What is known of a device that exists already, and of a NUMA node whose memory shall serve as one."""

from __future__ import annotations

import mmap
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emu.devdax import devdax_align_bytes, devdax_bytes
from emu.layout import HEADER_BYTES
from emu.pool.header import ForeignHeader, parse_page
from emu.provision.steps import DIRECTORY_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CHECKED_BYTES = 1 << 20
"""How much of a device's beginning is searched for somebody's data: file systems, partitions and LVM are found there."""
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What lies at the path of a device that is to be attached.

    Attributes:
        kind: "file", "devdax" or "other"; "missing" when nothing is there, "hidden" when this user may not look.
        size_bytes: its size.
        usable: readable and writable by this user.
        align_bytes: its size must be a multiple of this.
        resolved: the path without symbolic links.
        identity: names the device itself, whatever path leads there; "" unless it is a file or devdax.
        foreign: what it holds that is not a pool of ours, "" for nothing.
        has_directory: a pool's directory lies beside it.
        folder_writable: files can be made beside it, as stores do.
        holder: the testbed that uses it, "" for none.
    """

    kind: str
    size_bytes: int = 0
    usable: bool = False
    align_bytes: int = 1
    resolved: str = ""
    identity: str = ""
    foreign: str = ""
    has_directory: bool = False
    folder_writable: bool = True
    holder: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A NUMA node with memory.

    Attributes:
        free_bytes: what can be allocated on it: free pages, and half of those that hold clean file data.
        allowed: this process may allocate from it (its cpuset).
    """

    free_bytes: int
    allowed: bool = True


def path_facts(path: Path, holders: Mapping[str, str] | None = None) -> PathFacts:
    """The facts about one path.

    Args:
        path: of a device, or what was taken for one.
        holders: testbeds by the identity of the devices that they use.
    """
    try:
        found = path.stat()
    except PermissionError:
        return PathFacts("hidden")
    except OSError:
        return PathFacts("missing")
    kind, size_bytes, align_bytes = _kind_and_size(found)
    if kind == "other":
        return PathFacts("other")
    resolved = path.resolve()
    identity = _identity(found)
    usable = os.access(path, os.R_OK | os.W_OK)
    return PathFacts(
        kind,
        size_bytes,
        usable,
        align_bytes,
        str(resolved),
        identity,
        foreign=foreign_content(path, size_bytes) if usable else "",
        has_directory=any(os.path.lexists(f"{resolved}{suffix}") for suffix in DIRECTORY_SUFFIXES),
        folder_writable=os.access(resolved.parent, os.W_OK | os.X_OK),
        holder=(holders or {}).get(identity, ""),
    )


def _kind_and_size(found: os.stat_result) -> tuple[str, int, int]:
    if stat.S_ISREG(found.st_mode):
        return "file", found.st_size, mmap.PAGESIZE
    if stat.S_ISCHR(found.st_mode):
        with suppress(OSError, ValueError):
            size_bytes = devdax_bytes(found)
            if size_bytes is not None:
                return "devdax", size_bytes, devdax_align_bytes(found)
    return "other", 0, 1


def _identity(found: os.stat_result) -> str:
    if stat.S_ISCHR(found.st_mode):
        return f"char {os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return f"file {found.st_dev}:{found.st_ino}"


def identity_of(path: str) -> str:
    """PathFacts.identity of what lies at a path, "" where nothing can be seen."""
    try:
        return _identity(Path(path).stat())
    except OSError:
        return ""


def identities(testbeds: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Testbeds by the identity of each of their devices.

    Args:
        testbeds: the device paths of each testbed.
    """
    found = {identity_of(path): name for name, paths in testbeds.items() for path in paths}
    found.pop("", None)
    return found


def foreign_content(path: Path, size_bytes: int) -> str:
    """What the beginning of a device holds, if it is neither zeros nor a pool of ours; "" otherwise.

    A devdax device can only be mapped, not read.
    """
    if size_bytes < CHECKED_BYTES:
        return ""  # refused for its size
    try:
        with path.open("rb", buffering=0) as file:
            area = mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        return f"something that cannot be read: {error}"
    with area:
        page = area[:HEADER_BYTES]
        try:
            if parse_page(page) is not None:
                return ""
        except ForeignHeader as error:
            return str(error)
        rest = area[HEADER_BYTES:CHECKED_BYTES]
        first = len(rest) - len(rest.lstrip(b"\0"))
        if first == len(rest):
            return ""
        return f"foreign data at offset {HEADER_BYTES + first}"


def node_facts(wanted: Iterable[int]) -> dict[int, NodeFacts]:
    """Every NUMA node with memory; nothing is looked up when none is wanted."""
    if not set(wanted):
        return {}
    from emu.numa import allowed_nodes, nodes  # late: brings numpy, which most testbeds do without

    allowed = allowed_nodes()
    return {
        node: NodeFacts(node_free_bytes(node), not allowed or node in allowed) for node in nodes()
    }


def node_free_bytes(node: int, nodes: Path = _NODES) -> int:
    """What can be allocated on a node.

    As the kernel's MemAvailable, which counts at least half of clean file pages and reclaimable slabs as free
    (si_mem_available() in mm/show_mem.c).
    """
    lines = (nodes / f"node{node}" / "meminfo").read_text().splitlines()
    found = [re.fullmatch(r"Node \d+ (\S+):\s+(\d+) kB", line.strip()) for line in lines]
    kib = {match[1]: int(match[2]) for match in found if match}
    clean = kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0) + kib.get("SReclaimable", 0)
    return (kib["MemFree"] + clean // 2) << 10
