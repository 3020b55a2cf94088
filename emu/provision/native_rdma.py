"""Soft-RoCE on this machine itself, for hosts that are groups of processes (`--rdma native`).

The device sits on the loopback interface: what it sends never leaves the machine.
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import HostError, TestbedError, UserError
from emu.provision.steps import AddRdmaLink
from emu.rdma_link import delete_link, device_index, exists, new_link, send, wait_for_gid

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.provision.spec import TestbedSpec

INTERFACE = "lo"
ADDRESS = "127.0.0.1"
MODULE = "rdma_rxe"
REMEDY = "use --driver qemu, whose guests have soft-RoCE, or --rdma node"


def device_name(testbed: str) -> str:
    """Name of a testbed's RDMA device."""
    return f"emu-{testbed}"


def why_not() -> HostError | None:
    """Why this machine cannot have soft-RoCE made here; None when it can. Changes nothing."""
    if os.geteuid() != 0:
        words = "making a soft-RoCE device needs root"
        return HostError(words, capability="rdma_rxe", remedy=f"run as root, or {REMEDY}")
    if Path(f"/sys/module/{MODULE}").exists():
        return None
    try:
        found = subprocess.run(
            ["modprobe", "--dry-run", MODULE], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return HostError(f"modprobe: {error.strerror}", capability="rdma_rxe", remedy=REMEDY)
    if found.returncode:
        words = f"this kernel has no {MODULE}: {found.stderr.strip()}"
        return HostError(words, capability="rdma_rxe", remedy=REMEDY)
    return None


def native_steps(spec: TestbedSpec, found: HostError | None) -> list[AddRdmaLink]:
    """Steps that make a testbed's soft-RoCE device, if it asks for one.

    Args:
        spec: the testbed.
        found: what why_not() said.

    Raises:
        HostError: this machine cannot.
    """
    if spec.rdma != "native":
        return []
    if found is not None:
        raise found
    return [AddRdmaLink(device_name(spec.name), INTERFACE, ADDRESS)]


def add(name: str, step: AddRdmaLink, begin: Callable[[], None]) -> None:
    """Load the module if it is not there (it stays), and make the device.

    Args:
        name: the testbed's.
        step: what to make.
        begin: called when from here on a device of that name is ours.

    Raises:
        TestbedError: the interface has a soft-RoCE device already, or the name is taken.
        OSError: the kernel refuses.
    """
    if exists(step.device):
        raise TestbedError(f"there is an RDMA device {step.device} already", name=name)
    _load_module()
    begin()
    try:
        send(new_link(step.device, step.interface), step.device)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENFILE}:
            raise
        raise TestbedError(
            f"{step.interface} carries a soft-RoCE device already: {error.strerror}",
            name=name,
            remedy=f"`rdma link delete` removes one by hand, or {REMEDY}",
        ) from error
    wait_for_gid(step.device, step.address)


def _load_module() -> None:
    if not Path(f"/sys/module/{MODULE}").exists():
        subprocess.run(["modprobe", MODULE], check=False)  # it says itself what is missing


def remove(step: AddRdmaLink) -> bool:
    """Remove the device that a step made; False when it is not there.

    Raises:
        OSError: the kernel refuses.
    """
    index = device_index(step.device)
    if index is None:
        return False
    send(delete_link(index), step.device)
    return True


def refuse_in_guests(spec: TestbedSpec) -> None:
    """Raises UserError where guests are asked for."""
    if spec.rdma == "native":
        raise UserError(
            "--rdma native is soft-RoCE of this machine, which guests cannot reach",
            remedy="use --rdma rxe: each guest has its own; or --driver local",
        )
