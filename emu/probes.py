"""What this machine can do, found by trying: the rows of `emu doctor` and the skips of the tests.

A probe returns why it failed; what that costs and what mends it stand beside its name.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.suggest import did_you_mean
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

_QEMU = "qemu-system-x86_64"
_HUGE_BYTES = 2 << 20
_MEMLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `emu doctor`.

    Attributes:
        capability: its name, as `emu doctor --need` and pytest's `--emu-need` take it.
        ok: it is there.
        reason: what was seen.
        cost: what its lack costs the user, "" when ok.
        remedy: what mends it, "" when ok.
    """

    capability: str
    ok: bool
    reason: str
    cost: str
    remedy: str


Verdict = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class _Probe:
    run: Callable[[], Verdict]
    cost: str
    remedy: str


def _python() -> Verdict:
    linux = sys.platform == "linux" and platform.machine() in {"x86_64", "AMD64"}
    return linux, f"Python {platform.python_version()} on {sys.platform} {platform.machine()}"


def _import(module: str) -> tuple[object | None, str]:
    try:
        return importlib.import_module(module), ""
    except Exception as error:  # a broken package raises anything
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _native() -> Verdict:
    module, why = _import("emu._native")
    return module is not None, why or "emu._native loads"


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _flush() -> Verdict:
    found = [name for name in ("clflush", "clflushopt", "clwb") if name in _cpu_flags()]
    return "clflush" in found, f"has {', '.join(found) or 'none of clflush, clflushopt, clwb'}"


def _tsc() -> Verdict:
    missing = {"constant_tsc", "nonstop_tsc"} - _cpu_flags()
    clock = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = clock.read_text().strip() if clock.exists() else "unknown"
    words = f"no {', '.join(sorted(missing))}" if missing else "constant and never stops"
    return not missing, f"{words}; the kernel's clock is {source}"


def _shm() -> Verdict:
    from emu.provision.facts import SHM, free_bytes

    free = free_bytes(SHM)
    return free >= 1 << 30, f"{format_size(free)} free in {SHM}"


def _memory() -> Verdict:
    from emu.host_memory import free_bytes

    free = free_bytes()
    return free >= 2 << 30, f"{format_size(free)} free"


def _numa() -> Verdict:
    from emu import numa

    found = numa.nodes()
    return bool(found), f"nodes with memory: {', '.join(map(str, found)) or 'none'}"


def _numa2() -> Verdict:
    from emu import numa

    usable = set(numa.nodes()) & (set(numa.allowed_nodes()) or set(numa.nodes()))
    return len(usable) >= 2, f"{len(usable)} node(s) that this process may use"


def _mbind() -> Verdict:
    import warnings

    import numpy as np

    from emu import numa

    usable = numa.allowed_nodes() or numa.nodes()
    with mmap.mmap(-1, mmap.PAGESIZE) as area, warnings.catch_warnings():
        warnings.simplefilter("ignore", numa.NumaWarning)
        array = np.frombuffer(area, np.uint8)
        binding = numa.bind(array, usable[0] if usable else 0, fresh=True)
        del array
    return (
        binding.bound,
        binding.reason or f"a page was bound to node {binding.node} and found there",
    )


def _memlock() -> Verdict:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"a limit of {format_size(soft)}"
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, _MEMLOCK_BYTES) as area:
        start = ctypes.c_char.from_buffer(area)
        address = ctypes.c_void_p(ctypes.addressof(start))
        locked = libc.mlock(address, ctypes.c_size_t(_MEMLOCK_BYTES)) == 0
        why = os.strerror(ctypes.get_errno())
        del start
    words = "locked" if locked else f"not locked: {why}"
    return locked, f"{format_size(_MEMLOCK_BYTES)} {words}, {limit}"


def _thp_shmem() -> Verdict:
    """madvise says yes whatever the kernel does: only ShmemPmdMapped of the touched pages counts."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    words = setting.read_text().strip() if setting.exists() else "not there"
    with mmap.mmap(-1, 4 * _HUGE_BYTES) as area:
        area.madvise(mmap.MADV_HUGEPAGE)
        area.write(b"\1" * len(area))
        huge = "0"
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("ShmemPmdMapped:"):
                huge = line.split()[1]
    return huge != "0", f"{huge} KiB of shared memory on huge pages; shmem_enabled: {words}"


def _torch() -> Verdict:
    module, why = _import("torch")
    if module is None:
        return False, why
    build = getattr(getattr(module, "version", None), "cuda", None)
    return (
        True,
        f"torch {getattr(module, '__version__', '?')}, {f'CUDA {build}' if build else 'CPU'}",
    )


def _transformers() -> Verdict:
    module, why = _import("transformers")
    return module is not None, why or f"transformers {getattr(module, '__version__', '?')}"


def _uverbs() -> Verdict:
    nodes = sorted(Path("/dev/infiniband").glob("uverbs*"))
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return False, f"{node}: {error.strerror}"
        return True, f"{node} opens"
    return False, "no /dev/infiniband/uverbs*"


def _verbs() -> Verdict:
    """As a store does it: a usable port, opened by libibverbs."""
    from emu import _native
    from emu.rdma_ports import usable_ports

    ports, reason = usable_ports()
    if not ports:
        return False, reason
    port = ports[0]
    device = _native.VerbsDevice(port.device, port.number, port.gid_index)
    return True, f"{port.device} port {port.number}, {port.address}, MTU {device.mtu_bytes}"


def _ibverbs_headers() -> Verdict:
    code = "#include <infiniband/verbs.h>\n"
    argv = ["c++", "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(argv, input=code, capture_output=True, text=True, check=False)
    return done.returncode == 0, "infiniband/verbs.h is " + (
        "there" if not done.returncode else "missing"
    )


def _run(*argv: str) -> tuple[int, str]:
    """Exit status and output of a short command; 127 when it is not there, 124 when it hangs."""
    if shutil.which(argv[0]) is None:
        return 127, f"{argv[0]} is not installed"
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 124, str(error)
    return done.returncode, done.stdout + done.stderr


def _rxe() -> Verdict:
    if Path("/sys/module/rdma_rxe").exists():
        return True, "rdma_rxe is loaded"
    status, output = _run("modprobe", "--dry-run", "rdma_rxe")
    return status == 0, "rdma_rxe can be loaded" if status == 0 else output.strip().splitlines()[0]


def _qemu() -> Verdict:
    status, output = _run(_QEMU, "--version")
    return status == 0, output.strip().splitlines()[0] if output.strip() else f"status {status}"


def _cxl_type3() -> Verdict:
    status, output = _run(_QEMU, "-device", "cxl-type3,help")
    if status != 0:
        return False, output.strip().splitlines()[0] if output.strip() else f"status {status}"
    there = "volatile-memdev" in output
    return there, f"QEMU {'has' if there else 'has no'} volatile CXL Type-3 devices"


def _guest_kernel() -> Verdict:
    from emu.provision.guest_image import guest_image

    image = guest_image()
    return True, f"kernel {image.version}, {image.initramfs}"


def _installed(*programs: str) -> Verdict:
    missing = [program for program in programs if shutil.which(program) is None]
    return not missing, f"no {', '.join(missing)}" if missing else f"{', '.join(programs)}"


def _rdma_clients() -> Verdict:
    return _installed("ibv_rc_pingpong", "ib_read_bw")


def _fio() -> Verdict:
    return _installed("fio")


def _kvm() -> Verdict:
    """By the guest that `emu up` tries, too: /dev/kvm alone proves nothing."""
    from emu.errors import HostError
    from emu.provision.guest_facts import gather_guest_facts

    found = gather_guest_facts()
    if isinstance(found, HostError):
        return False, f"not tried: {found.message}"
    return found.accelerator == "kvm", found.accelerator_reason


def _perf() -> Verdict:
    """Count this thread's instructions: perf_event_open(2), PERF_TYPE_HARDWARE, user space only."""
    attributes = struct.pack("IIQQQQQ", 0, 112, 1, 0, 0, 0, 1 << 5 | 1 << 6).ljust(112, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    minus_one, none = ctypes.c_long(-1), ctypes.c_ulong(0)
    fd = libc.syscall(ctypes.c_long(298), attributes, ctypes.c_long(0), minus_one, minus_one, none)
    if fd < 0:
        return False, f"perf_event_open: {os.strerror(ctypes.get_errno())}"
    try:
        count = int.from_bytes(os.read(fd, 8), "little")
    finally:
        os.close(fd)
    return count > 0, f"counted {count} instructions"


_NO_GUESTS = "emu up --driver qemu is refused; auto takes the local driver"
_NONE_NOW = (
    "no soft-RoCE on this machine itself; guests have their own, the local driver does without"
)
PROBES: dict[str, _Probe] = {
    "python": _Probe(_python, "emu runs on Linux x86-64 only", "use such a machine"),
    "native": _Probe(
        _native, "no store and no clock works", "pip install --force-reinstall sac-emu"
    ),
    "cpu_flush": _Probe(_flush, "cxl stores cannot flush lines", "use a CPU with clflush"),
    "tsc": _Probe(_tsc, "--time paced cannot wait exactly", "use --time virtual"),
    "shm": _Probe(
        _shm,
        "the default pool of 4 x 256M does not fit /dev/shm",
        "docker run --shm-size=2g, a smaller --device-size, or --dir on a disk",
    ),
    "memory": _Probe(
        _memory, "the default testbed and models may not fit", "free some, or use --model tiny"
    ),
    "numa": _Probe(_numa, "numa_node= is refused", "leave numa_node out"),
    "numa2": _Probe(_numa2, "memory cannot be placed on a far node", "a machine with two nodes"),
    "mbind": _Probe(
        _mbind,
        "numa_bound is false in the stats",
        "docker run --cap-add SYS_NICE, or leave numa_node out",
    ),
    "memlock": _Probe(_memlock, "real verbs cannot register buffers", "ulimit -l unlimited"),
    "thp_shmem": _Probe(
        _thp_shmem,
        "gathers from the pool are about 1.2 times slower",
        "as root: mount -t tmpfs -o huge=always emu DIR, then emu up --dir DIR",
    ),
    "torch": _Probe(
        _torch,
        "emu run does not work",
        "pip install torch (scripts/quickstart takes the CPU build)",
    ),
    "transformers": _Probe(
        _transformers, "the model's reference tests are skipped", "pip install transformers"
    ),
    "uverbs": _Probe(_uverbs, _NONE_NOW, "modprobe ib_uverbs, and an RDMA device"),
    "verbs": _Probe(
        _verbs,
        "rdma stores go by the memory node's own threads (transport process), on this machine only",
        "an RDMA device with an IPv4 address, and: apt install ibverbs-providers",
    ),
    "ibverbs_headers": _Probe(
        _ibverbs_headers,
        "the test that compares our declarations of libibverbs with its header is skipped",
        "apt install libibverbs-dev",
    ),
    "rdma_rxe": _Probe(_rxe, _NONE_NOW, "a kernel with CONFIG_RDMA_RXE"),
    "qemu": _Probe(_qemu, _NO_GUESTS, "scripts/guest-image, as root"),
    "cxl_type3": _Probe(_cxl_type3, _NO_GUESTS, "QEMU 8.1 or later: scripts/guest-image, as root"),
    "guest_kernel": _Probe(_guest_kernel, _NO_GUESTS, "scripts/guest-image"),
    "rdma_clients": _Probe(
        _rdma_clients,
        "ibv_rc_pingpong and ib_read_bw cannot try a guest's soft-RoCE",
        "apt install perftest ibverbs-utils",
    ),
    "fio": _Probe(_fio, "fio cannot try a guest's devdax", "apt install fio"),
    "kvm": _Probe(
        _kvm, "guests run by TCG: about ten times slower", "nothing to do; everything works so"
    ),
    "perf": _Probe(
        _perf,
        "no hardware counters beside the figures of emu bench",
        "kernel.perf_event_paranoid=2",
    ),
}


def check_names(names: list[str]) -> list[str]:
    """The names, if all are capabilities.

    Raises:
        UserError: unknown; says the closest.
    """
    for name in names:
        if name not in PROBES:
            raise UserError(f"no capability {name!r}", remedy=did_you_mean(name, PROBES))
    return names


@functools.cache
def probe(name: str) -> Finding:
    """Try one capability, once per process.

    Raises:
        UserError: no such capability.
    """
    check_names([name])
    entry = PROBES[name]
    try:
        ok, reason = entry.run()
    except Exception as error:  # an odd machine must not end the diagnosis
        ok, reason = False, f"the probe failed: {type(error).__name__}: {error}"
    return Finding(name, ok, reason, "" if ok else entry.cost, "" if ok else entry.remedy)
