"""The steps of a plan: each says what it makes, none does it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

DIRECTORY_SUFFIXES = (".directory", ".directory-wal", ".directory-shm", ".directory-journal")
"""What stores make beside a device or a memory node's socket: the pool's directory, a SQLite file."""


@dataclass(frozen=True, slots=True)
class MakeRoot:
    """Make the default root where it is missing; removed when empty."""

    path: str

    def __str__(self) -> str:
        return f"make {self.path} (mode 0700) if it is missing"


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """Make the run directory, for this user only."""

    path: str

    def __str__(self) -> str:
        return f"make {self.path} (mode 0700)"


@dataclass(frozen=True, slots=True)
class MakeFile:
    """Make a file with that text."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"write {self.path}"


@dataclass(frozen=True, slots=True)
class AllocateDevice:
    """Make a device file with every page allocated, so that no later write finds the medium full.

    Attributes:
        path: the file.
        size_bytes: of it.
        numa_node: where its pages shall lie, None for anywhere.
    """

    path: str
    size_bytes: int
    numa_node: int | None = None

    def __str__(self) -> str:
        where = "" if self.numa_node is None else f" on NUMA node {self.numa_node}"
        return f"allocate {self.path}, {format_size(self.size_bytes)}{where}"


@dataclass(frozen=True, slots=True)
class AttachDevice:
    """Take an existing device for this testbed alone; it is neither resized nor removed.

    Attributes:
        path: the device, without symbolic links.
        has_directory: a pool's directory lay beside it before; else one that stores make is removed by down.
    """

    path: str
    has_directory: bool

    def __str__(self) -> str:
        return f"attach {self.path}"


@dataclass(frozen=True, slots=True)
class ClearDevice:
    """Overwrite what an attached device holds, as --overwrite allows."""

    path: str
    size_bytes: int

    def __str__(self) -> str:
        return f"overwrite the beginning of {self.path} with zeros"


@dataclass(frozen=True, slots=True)
class MakeScratch:
    """Make the directory in which each `emu run` has one of its own: whatever lies in it is the testbed's."""

    path: str

    def __str__(self) -> str:
        return f"make {self.path} for runs"


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process of the testbed and wait until it prints a line.

    Attributes:
        role: what it is, unique in the testbed.
        argv: its command.
        log: the file that takes its output.
        ready: the line on stdout that says that it serves.
        creates: paths that it makes itself, removed after it.
    """

    role: str
    argv: tuple[str, ...]
    log: str
    ready: str
    creates: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"start {self.role}: {' '.join(self.argv)}"


@dataclass(frozen=True, slots=True)
class StartGuest:
    """Start a guest's QEMU; SetUpGuest waits for it, so that guests boot side by side.

    Attributes:
        host: the guest's name.
        argv: QEMU's command.
        log: takes QEMU's words and the guest's console.
    """

    host: str
    argv: tuple[str, ...]
    log: str

    @property
    def role(self) -> str:
        """The process's name in the record."""
        return f"qemu {self.host}"

    def __str__(self) -> str:
        return f"start {self.role}: {shlex.join(self.argv)}"


@dataclass(frozen=True, slots=True)
class SetUpGuest:
    """Wait for a guest's agent (and boot the guest anew where it hangs), then make its regions and network.

    Attributes:
        host: the guest's name.
        directory: of its sockets.
        ports: of its agent.
        regions: serials of each region's devices, in the order of the interleave.
        mac, address: of its interface.
        peers: "name=address" of every host.
        rxe: soft-RoCE on the interface.
    """

    host: str
    directory: str
    ports: int
    regions: tuple[tuple[int, ...], ...]
    mac: str
    address: str
    peers: tuple[str, ...]
    rxe: bool

    def __str__(self) -> str:
        rxe = ", soft-RoCE" if self.rxe else ""
        return f"set up {self.host}: {len(self.regions)} regions, {self.address}{rxe}"


@dataclass(frozen=True, slots=True)
class AddRdmaLink:
    """Make a soft-RoCE device on this machine.

    Attributes:
        device: its name, the testbed's own.
        interface: the network interface below it.
        address: the interface's IPv4 address, which its GID maps.
    """

    device: str
    interface: str
    address: str

    def __str__(self) -> str:
        return f"make the soft-RoCE device {self.device} on {self.interface}"


Step: TypeAlias = (
    MakeRoot
    | MakeDirectory
    | MakeFile
    | AllocateDevice
    | AttachDevice
    | ClearDevice
    | MakeScratch
    | StartProcess
    | StartGuest
    | SetUpGuest
    | AddRdmaLink
)
STEPS: dict[str, type[Step]] = {cls.__name__: cls for cls in get_args(Step)}


def step_to_json(step: Step) -> dict[str, Any]:
    """A step as JSON values."""
    return {"action": type(step).__name__, **asdict(step)}


def step_from_json(raw: Mapping[str, Any]) -> Step:
    """The step that step_to_json wrote."""
    values = {k: _tuples(v) for k, v in raw.items() if k != "action"}
    cls: Any = STEPS[raw["action"]]
    step: Step = cls(**values)
    return step


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
