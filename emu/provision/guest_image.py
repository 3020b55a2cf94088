"""What a guest boots: a kernel package unpacked in the cache, and an initramfs of our own made from it.

The cache is $XDG_CACHE_HOME/emu/guest (by default ~/.cache): kernels/VERSION/ as `scripts/guest-image` unpacks
them, initramfs-HASH.img as built here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import os
import re
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from emu.errors import HostError

DATA = Path(__file__).parents[2] / "qemu"
"""The guest's sources; beside the package `emu` in a checkout and in a wheel."""
RDMA_LINK = Path(__file__).parents[1] / "rdma_link.py"
"""What the agent shares with the host's own soft-RoCE."""
REMEDY = "run `scripts/guest-image`, which gets a kernel package without root"


@dataclass(frozen=True, slots=True)
class GuestImage:
    """What QEMU is given.

    Attributes:
        kernel: the compressed kernel.
        initramfs: ours.
        version: the kernel's release.
    """

    kernel: str
    initramfs: str
    version: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel package.

    Attributes:
        vmlinuz: the compressed kernel.
        modules: the directory of its modules, lib/modules/RELEASE.
    """

    vmlinuz: Path
    modules: Path

    @property
    def release(self) -> str:
        """What `uname -r` says."""
        return self.modules.name


def cache_directory() -> Path:
    """Where kernels and initramfs are kept."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home.startswith("/") else Path.home() / ".cache") / "emu" / "guest"


def find_kernel(cache: Path | None = None) -> Kernel:
    """The newest kernel in the cache.

    Raises:
        HostError: there is none.
    """
    found = []
    for vmlinuz in ((cache or cache_directory()) / "kernels").glob("*/boot/vmlinuz-*"):
        release = vmlinuz.name.removeprefix("vmlinuz-")
        for root in ("lib", "usr/lib"):
            modules = vmlinuz.parents[1] / root / "modules" / release
            if modules.is_dir():
                found.append(Kernel(vmlinuz, modules))
                break
    if not found:
        raise HostError("there is no guest kernel", capability="guest_kernel", remedy=REMEDY)
    return max(
        found, key=lambda k: [int(part) for part in re.findall(r"\d+", k.release.split("-")[0])]
    )


def find_busybox(cache: Path | None = None) -> Path:
    """A busybox that needs no library.

    Raises:
        HostError: there is none.
    """
    kept = (cache or cache_directory()) / "busybox"
    for path in (kept, Path("/bin/busybox"), Path("/usr/bin/busybox")):
        if path.is_file() and _is_static_program(path.read_bytes()[:8192]):
            return path
    raise HostError("there is no static busybox", capability="guest_kernel", remedy=REMEDY)


def _is_static_program(head: bytes) -> bool:
    """Whether a file that begins so is an ELF program that needs no loader (a dynamic one names it at its beginning)."""
    return head.startswith(b"\x7fELF") and b"/lib64/ld-linux" not in head


def guest_image(cache: Path | None = None) -> GuestImage:
    """The image for new guests; its initramfs is built if the one of these sources is not there.

    Raises:
        HostError: no kernel, no busybox, or a kernel without a module that guests need.
    """
    where = cache or cache_directory()
    kernel, busybox = find_kernel(where), find_busybox(where)
    place = f"{kernel.vmlinuz}\0{sys.executable}\0{_packages_directory()}\0"
    key = hashlib.sha256(place.encode())
    key.update(busybox.read_bytes())
    for source in (RDMA_LINK, *sorted((DATA / "guest").iterdir())):
        if source.is_file():
            key.update(source.name.encode() + b"\0" + source.read_bytes())
    image = where / f"initramfs-{key.hexdigest()[:16]}.img"
    if not image.exists():
        _publish(image, build_initramfs(kernel, busybox))
    return GuestImage(str(kernel.vmlinuz), str(image), kernel.release)


def _packages_directory() -> str:
    """Where this Python has pyroute2; the guest sees the same files."""
    found = importlib.util.find_spec("pyroute2")
    assert found is not None, "a dependency of ours"
    assert found.origin is not None
    return str(Path(found.origin).parents[1])


def _publish(path: Path, data: bytes) -> None:
    """Write a file that others may be writing, too; nobody sees half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
        draft.write(data)
    Path(draft.name).replace(path)


def build_initramfs(kernel: Kernel, busybox: Path) -> bytes:
    """The initramfs: busybox, our init and agent, and the modules that guests need, as a cpio archive.

    Raises:
        HostError: the kernel lacks a module.
    """
    wanted = tomllib.loads((DATA / "guest" / "modules.toml").read_text())
    tree = ModuleTree(kernel)
    boot = tree.order(wanted["boot"])
    archive = Archive()
    for directory in ("bin", "dev", "proc", "sys", "emu", "emu/modules", "emu/later"):
        archive.directory(directory)
    archive.file("bin/busybox", busybox.read_bytes(), 0o755)
    archive.file("init", (DATA / "guest" / "init").read_bytes(), 0o755)
    for name in ("supervise", "agent.py", "cxl.py", "net.py"):
        archive.file(f"emu/{name}", (DATA / "guest" / name).read_bytes())
    archive.file("emu/rdma_link.py", RDMA_LINK.read_bytes())
    archive.file("emu/python", sys.executable.encode())
    archive.file("emu/packages", _packages_directory().encode())
    archive.file("emu/module-tree", str(kernel.modules).encode())
    archive.file("emu/boot-modules", "".join(f"{name}\n" for name in boot).encode())
    modules = list(boot)
    for name in wanted["later"]:
        order = tree.order([name])
        archive.file(f"emu/later/{name}", "".join(f"{each}\n" for each in order).encode())
        modules += [each for each in order if each not in modules]
    for name in modules:
        archive.file(f"emu/modules/{name}.ko", tree.read(name))
    return archive.finish()


class ModuleTree:
    """The modules of a kernel package, without depmod: each module's own "depends" says what it needs.

    Args:
        kernel: the unpacked package.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._release = kernel.release
        self._paths = {
            _module_name(path): path for path in (kernel.modules / "kernel").rglob("*.ko*")
        }
        lines = (kernel.modules / "modules.builtin").read_text().splitlines()
        self._builtin = {_module_name(Path(line)) for line in lines}

    def order(self, names: list[str]) -> list[str]:
        """These modules and all that they depend on, each after what it needs; built-in ones left out.

        Raises:
            HostError: a module is neither there nor built in.
        """
        ordered: list[str] = []
        for name in names:
            self._add(name, ordered)
        return ordered

    def _add(self, name: str, ordered: list[str]) -> None:
        if name in ordered or name in self._builtin:
            return
        if name not in self._paths:
            raise HostError(
                f"the guest kernel {self._release} has no module {name}",
                capability="guest_kernel",
                remedy="use a distribution's generic kernel (a cloud kernel has no rdma_rxe)",
            )
        found = re.search(rb"\0depends=([^\0]*)\0", self.read(name))
        for needed in found[1].decode().split(",") if found else []:
            if needed:
                self._add(needed.replace("-", "_"), ordered)
        ordered.append(name)

    def read(self, name: str) -> bytes:
        """A module's bytes, decompressed."""
        path = self._paths[name]
        data = path.read_bytes()
        if path.suffix == ".xz":
            return lzma.decompress(data)
        if path.suffix == ".zst":
            return _unzstd(path)
        return data


def _module_name(path: Path) -> str:
    return path.name.split(".ko")[0].replace("-", "_")


def _unzstd(path: Path) -> bytes:
    """Python has zstd from 3.14 on only; the tool is in every distribution that packs modules so."""
    import subprocess

    if shutil.which("zstd") is None:
        raise HostError(
            f"{path.name} cannot be unpacked", capability="guest_kernel", remedy="apt install zstd"
        )
    return subprocess.run(["zstd", "-dcq", str(path)], check=True, capture_output=True).stdout


class Archive:
    """A cpio archive in the kernel's format "newc" (Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._inode = 0

    def directory(self, name: str) -> None:
        """Add a directory."""
        self._entry(name, b"", 0o040755)

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Add a file."""
        self._entry(name, data, 0o100000 | mode)

    def finish(self) -> bytes:
        """The whole archive."""
        self._entry("TRAILER!!!", b"", 0)
        return bytes(self._data)

    def _entry(self, name: str, data: bytes, mode: int) -> None:
        self._inode += 1
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        self._data += b"070701" + b"".join(b"%08X" % field for field in fields)
        self._data += name.encode() + b"\0"
        self._pad()
        self._data += data
        self._pad()

    def _pad(self) -> None:
        self._data += bytes(-len(self._data) % 4)
