"""KVM or TCG, by trying: that /dev/kvm is there proves nothing.

A nested machine's KVM may die in the guest's decompressor, and QEMU stays. Where guests boot, CXL memory may still
kill them: released QEMUs emulate each access to it, and KVM's emulator knows no vector instructions. So a guest with
one device is booted, and copies bytes to and from it. TCG always works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import EmuError
from emu.guest.session import ask, open_session
from emu.host_memory import available_bytes
from emu.process import boot_id
from emu.provision.guests import Backing, GuestSpec, qemu_argv
from emu.provision.topology import WINDOW_BYTES, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from emu.provision.guest_image import GuestImage
    from emu.provision.guests import Machine

KVM = "/dev/kvm"
BOOT_TIMEOUT_S = 30.0
"""A guest under a KVM that works boots in two or three seconds."""
COPY = (
    "import mmap, os; m = mmap.mmap(os.open('/dev/dax0.0', os.O_RDWR), 2 << 20); d = os.urandom(1 << 16)\n"
    "m[64 : 64 + len(d)] = d; print(m[64 : 64 + len(d)] == d)"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What guests run by.

    Attributes:
        accelerator: "kvm" or "tcg".
        reason: why.
    """

    accelerator: str
    reason: str


def choose_accelerator(qemu: str, version: str, image: GuestImage, machine: Machine) -> Verdict:
    """KVM if a guest with a CXL device works by it, else TCG; tried once per boot of this machine and kept."""
    try:
        os.close(os.open(KVM, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Verdict("tcg", f"{KVM}: {error.strerror}")
    kept = Path(image.initramfs).parent / "accelerator.json"
    key = [boot_id(), qemu, version, image.version, Path(image.initramfs).name]
    try:
        found = json.loads(kept.read_bytes())
        if found["key"] == key:
            return Verdict(found["accelerator"], found["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    verdict = try_kvm(qemu, image, machine)
    draft = kept.with_suffix(f".{os.getpid()}")
    draft.write_text(
        json.dumps({"key": key, "accelerator": verdict.accelerator, "reason": verdict.reason})
    )
    draft.replace(kept)
    return verdict


def try_kvm(qemu: str, image: GuestImage, machine: Machine) -> Verdict:
    """Boot a guest with one device by KVM and move bytes in it."""
    small = replace(machine, memory="512M", agent_ports=1)
    with tempfile.TemporaryDirectory(prefix="emu-kvm-") as directory:
        pool = Path(directory) / "pool"
        with pool.open("xb") as file:
            file.truncate(WINDOW_BYTES)  # sparse: little of it is touched, and only by the guest
        spec = GuestSpec(
            qemu=qemu,
            accelerator="kvm",
            machine=small,
            kernel=image.kernel,
            initramfs=image.initramfs,
            directory=directory,
            number=0,
            backings=(Backing(str(pool), WINDOW_BYTES, 1),),
            topology=lay_out([WINDOW_BYTES], "direct", 1),
            switch_socket=None,
        )
        if available_bytes() < WINDOW_BYTES + (1 << 30):
            return Verdict("tcg", "too little memory is free to try KVM")
        console = Path(directory) / "console"
        with _running(qemu_argv(spec), console) as process:
            trouble = _use(spec, process)
        if trouble:
            words = console.read_bytes().decode(errors="replace")
            lines = [line for line in words.splitlines() if "kvm" in line.lower()]
            error = lines[-1] if lines else ""
            return Verdict("tcg", f"under KVM {trouble}{f': {error}' if error else ''}")
    return Verdict("kvm", "a guest with a CXL device works by it")


@contextmanager
def _running(argv: tuple[str, ...], console: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        console.open("wb") as log,
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _use(spec: GuestSpec, process: subprocess.Popen[bytes]) -> str:
    """What goes wrong when a guest boots and uses its device; "" when nothing does."""
    console = Path(spec.directory) / "console"
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while True:
        try:
            ask(spec.directory, 1, timeout_s=1.0, do="ping")
            break
        except EmuError:
            dead = process.poll() is not None or b"KVM internal error" in console.read_bytes()
            if dead or time.monotonic() > deadline:
                return "a guest does not boot"
            time.sleep(0.1)
    try:
        ask(spec.directory, 1, timeout_s=BOOT_TIMEOUT_S, do="setup", host="probe", regions=[[1]])
        python = [sys.executable, "-I", "-S", "-c", COPY]
        with open_session(spec.directory, 1, timeout_s=BOOT_TIMEOUT_S) as session:
            session.request(
                do="exec", argv=python, env={"PATH": os.environ.get("PATH", "")}, cwd="/"
            )
            output = b""
            while True:
                for kind, body in session.frames():
                    output += body if kind == b"o" else b""
                    if kind == b"A":
                        return "" if output == b"True\n" else "a guest cannot copy to CXL memory"
    except EmuError as error:
        return f"a guest dies when it uses CXL memory ({error.message})"
