"""What a plan depends on, read from the machine; nothing is changed here."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from emu.host_memory import MEMORY_FILE_SYSTEMS, available_bytes, cgroup_free_bytes, mount_of
from emu.provision import native_rdma
from emu.provision.attached import identities, node_facts, path_facts
from emu.provision.guest_facts import gather_guest_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from emu.errors import HostError
    from emu.provision.attached import NodeFacts, PathFacts
    from emu.provision.guest_facts import GuestFacts
    from emu.provision.spec import TestbedSpec

SHM = Path("/dev/shm")


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
        nodes: NUMA nodes with memory; empty where no device asks for one, or the kernel knows none.
        no_native_rdma: why this machine cannot have soft-RoCE of its own; None where it can, or nobody asks for it.
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
    nodes: Mapping[int, NodeFacts] = field(default_factory=dict)
    no_native_rdma: HostError | None = None


def default_root() -> Path:
    """Where run directories lie without --dir."""
    return SHM / f"emu-{os.getuid()}"


def gather_facts(
    spec: TestbedSpec, directory: Path | None, testbeds: Mapping[str, Sequence[str]]
) -> Facts:
    """The facts for this spec.

    Args:
        spec: what is wanted.
        directory: --dir, None for the default.
        testbeds: names that are taken, each with the paths of its devices.
    """
    holders = identities(testbeds)
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
        paths={d.path: path_facts(Path(d.path), holders) for d in spec.devices if d.path},
        guests=gather_guest_facts() if _wants_guests(spec) else None,
        nodes=node_facts(d.numa_node for d in spec.devices if d.numa_node is not None),
        no_native_rdma=native_rdma.why_not() if spec.rdma == "native" else None,
    )


def _wants_guests(spec: TestbedSpec) -> bool:
    attached = any(device.attached for device in spec.devices)
    return spec.driver == "qemu" or (spec.driver == "auto" and not attached)


def free_bytes(path: Path) -> int:
    """What an ordinary user can still write on this path's file system; 0 where the path is missing."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
