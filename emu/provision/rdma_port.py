"""The RDMA port that a host's programs use: which device, and which of its GIDs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.guest.session import ask
from emu.provision.steps import AddRdmaLink
from emu.rdma_link import find_gid

if TYPE_CHECKING:
    from emu.provision.testbed import Testbed


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """Port 1 of an RDMA device.

    Attributes:
        device: its name.
        gid_index: of the RoCE v2 GID that maps the host's IPv4 address.
    """

    device: str
    gid_index: int

    @property
    def env(self) -> dict[str, str]:
        """For programs; a guest's agent gives its programs the same."""
        return {"EMU_RDMA_DEVICE": self.device, "EMU_RDMA_GID_INDEX": str(self.gid_index)}


def rdma_port(testbed: Testbed, host: str) -> RdmaPort | None:
    """The host's port, None where it has none.

    Raises:
        GuestSilent: the guest does not answer.
    """
    guest = testbed.guest(host)
    if guest is not None:
        found = ask(guest.directory, guest.ports, do="network")["network"]
        return RdmaPort(found["rdma_device"], found["gid_index"]) if "gid_index" in found else None
    for entry in testbed.record.steps:
        if isinstance(entry.step, AddRdmaLink):
            index = find_gid(entry.step.device, entry.step.address)
            return None if index is None else RdmaPort(entry.step.device, index)
    return None
