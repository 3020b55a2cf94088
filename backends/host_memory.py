"""How much memory this process may still take, and the refusal when that is too little."""

from __future__ import annotations

from pathlib import Path

from emu.errors import HostError
from emu.units import format_size

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def free_bytes(
    meminfo: Path = _MEMINFO, own_cgroup: Path = _OWN_CGROUP, cgroup_root: Path = _CGROUP_ROOT
) -> int:
    """Bytes that can be allocated without swapping: MemAvailable, or what the cgroup (v2) still allows."""
    free = next(
        int(line.split()[1]) * 1024
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    group = _own_group(own_cgroup, cgroup_root)
    while group is not None and group.is_relative_to(cgroup_root):
        free = min(free, _group_free_bytes(group, free))
        group = group.parent
    return free


def require_free(nbytes: int, what: str) -> None:
    """Refuse an allocation that does not fit.

    Raises:
        HostError: with the numbers.
    """
    free = free_bytes()
    if nbytes > free:
        raise HostError(
            f"{what} needs {format_size(nbytes)}, but only {format_size(free)} of memory are free",
            capability="memory",
            remedy="make it smaller, stop other programs, or raise the container's memory limit",
        )


def _own_group(own_cgroup: Path, cgroup_root: Path) -> Path | None:
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return None
    own = [line[3:] for line in lines if line.startswith("0::")]
    return cgroup_root / own[0].lstrip("/") if own else None


def _group_free_bytes(group: Path, unlimited: int) -> int:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return unlimited
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return unlimited
    # The kernel drops file pages before it refuses an allocation.
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
