"""Where the devices of a guest sit: host bridges, switches, windows and regions, within QEMU's and Linux's limits.

QEMU has four HDM decoders at every level (host bridge, switch, device) and Linux commits them in order, so that a
host bridge serves at most four regions; more devices get more host bridges. Every region has a window of its own:
Linux makes one NUMA node of each window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW_BYTES = 256 << 20
"""Sizes of windows and of devices' ranges are multiples of this (CXL 2.0 section 8.2.5.12; QEMU refuses others)."""
DECODERS = 4
INTERLEAVES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Region:
    """One region: the devices that it interleaves, by number, and the host bridge above them.

    Attributes:
        devices: numbers of the testbed's devices, in the order of the interleave.
        bridge: number of the host bridge.
        size_bytes: of the window and the region.
    """

    devices: tuple[int, ...]
    bridge: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Regions and how their devices hang on the host bridges.

    Attributes:
        kind: "direct" (a root port for each device) or "switch" (a switch below each host bridge).
        regions: in the order of the devices; the guest's kernel numbers them so.
    """

    kind: str
    regions: tuple[Region, ...]

    @property
    def bridges(self) -> int:
        """Number of host bridges."""
        return self.regions[-1].bridge + 1

    def devices_of(self, bridge: int) -> tuple[int, ...]:
        """Numbers of the devices below a host bridge."""
        return tuple(d for r in self.regions if r.bridge == bridge for d in r.devices)


def lay_out(sizes: Sequence[int], kind: str, interleave: int) -> Topology:
    """The topology for devices of these sizes.

    Args:
        sizes: bytes of each device.
        kind: "direct" or "switch".
        interleave: devices in a region.

    Raises:
        UserError: sizes or an interleave that CXL or QEMU cannot have; says what can be.
    """
    for number, size in enumerate(sizes):
        if size % WINDOW_BYTES or not size:
            raise UserError(
                f"device {number} has {format_size(size)}: QEMU's CXL devices have multiples of 256M",
                remedy="use --device-size 256M, 512M, ..., or --driver local",
            )
    if interleave not in INTERLEAVES or len(sizes) % interleave:
        raise UserError(
            f"{len(sizes)} devices cannot be interleaved by {interleave}",
            remedy="interleave 1, 2 or 4, and as many devices as a multiple of that",
        )
    regions, below = [], [0]
    for first in range(0, len(sizes), interleave):
        members = tuple(range(first, first + interleave))
        if len({sizes[m] for m in members}) > 1:
            raise UserError(
                f"devices {members[0]} to {members[-1]} are interleaved but differ in size",
                remedy="give them one size",
            )
        if below[-1] + interleave > DECODERS:
            below.append(0)
        below[-1] += interleave
        regions.append(Region(members, len(below) - 1, sum(sizes[m] for m in members)))
    return Topology(kind, tuple(regions))
