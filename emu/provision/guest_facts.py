"""Whether guests can run on this machine, and with what; found by trying, remembered where trying is slow."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from emu.errors import HostError
from emu.provision.accelerator import choose_accelerator
from emu.provision.guest_image import DATA, guest_image
from emu.provision.guests import Machine

if TYPE_CHECKING:
    from emu.provision.guest_image import GuestImage

QEMU = "qemu-system-x86_64"
QEMU_REMEDY = "run `scripts/guest-image`, as root, or: apt install qemu-system-x86 (8.1 or later)"


@dataclass(frozen=True, slots=True)
class GuestFacts:
    """What guests run on.

    Attributes:
        qemu: path of the program.
        version: QEMU's.
        accelerator: "tcg" or "kvm".
        accelerator_reason: why that one.
        image: what guests boot.
        machine: their hardware.
    """

    qemu: str
    version: str
    accelerator: str
    accelerator_reason: str
    image: GuestImage
    machine: Machine

    def describe(self) -> str:
        """In a few words."""
        accelerator = f"{self.accelerator} ({self.accelerator_reason})"
        return f"QEMU {self.version} and kernel {self.image.version}, by {accelerator}"


def load_machine(name: str = "default") -> Machine:
    """A machine profile of qemu/machines."""
    return Machine(**tomllib.loads((DATA / "machines" / f"{name}.toml").read_text()))


@cache
def qemu_program() -> tuple[str, str]:
    """(path, version) of a QEMU that has volatile CXL Type-3 devices.

    Raises:
        HostError: there is none; says which is missing.
    """
    path = shutil.which(QEMU)
    if path is None:
        raise HostError(f"{QEMU} is not installed", capability="qemu", remedy=QEMU_REMEDY)
    version = re.search(r"version (\S+)", _output(path, "--version"))
    if "volatile-memdev" not in _output(path, "-device", "cxl-type3,help"):
        raise HostError(
            f"{path} {version[1] if version else ''} has no volatile CXL Type-3 devices",
            capability="cxl_type3",
            remedy=QEMU_REMEDY,
        )
    return path, version[1] if version else "?"


def _output(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"{argv[0]}: {error}", capability="qemu", remedy=QEMU_REMEDY) from error
    return done.stdout + done.stderr


def gather_guest_facts() -> GuestFacts | HostError:
    """What guests can run on, or why they cannot."""
    try:
        image = guest_image()
        path, version = qemu_program()
    except HostError as error:
        return error
    machine = load_machine()
    verdict = choose_accelerator(path, version, image, machine)
    return GuestFacts(path, version, verdict.accelerator, verdict.reason, image, machine)
