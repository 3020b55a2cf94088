"""Two guests on one pool: real CXL devices, regions and devdax nodes, real soft-RoCE, programs and files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import private_home

import emu
from emu.errors import TestbedError, UserError
from emu.guest.files import get_file, put_file
from emu.provision import faults
from emu.provision.client_env import client_env
from emu.provision.devices import devices_of, set_mode
from emu.provision.rdma_port import RdmaPort, rdma_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from emu import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.needs("qemu", "cxl_type3", "guest_kernel")]

MIB = 1 << 20
DEVDAX = """
import mmap, os, sys
verb, path, offset, text = sys.argv[1:]
data, offset = bytes.fromhex(text), int(offset)
memory = mmap.mmap(os.open(path, os.O_RDWR), 256 << 20)
if verb == "write":
    memory[offset : offset + len(data)] = data
sys.stdout.write(memory[offset : offset + len(data)].hex())
"""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with (
        pytest.MonkeyPatch.context() as patch,
        private_home(tmp_path_factory.mktemp("guests"), patch) as home,
        emu.testbed(4, hosts=2, driver="qemu", name="g", directory=home.run) as testbed,
    ):
        yield testbed


def run(bed: Testbed, host: str, *argv: str, stdin: bytes = b"", timeout_s: float = 120.0) -> str:
    done = bed.exec(host, argv, stdin=stdin, timeout_s=timeout_s)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.decode()


def python(bed: Testbed, host: str, source: str, *arguments: str) -> str:
    return run(bed, host, sys.executable, "-I", "-S", "-c", source, *arguments)


# -- the pool ---------------------------------------------------------------------------------------------
def test_a_guest_has_the_devices_in_the_testbeds_order(bed: Testbed) -> None:
    """The kernel's memN numbers differ at each boot; a wrong device would show another file's bytes."""
    for number, path in enumerate(bed.devices):
        with Path(path).open("r+b") as device:
            device.seek(4096 * number)
            device.write(b"device %d" % number)
    for host in bed.hosts:
        paths = run(bed, host, "sh", "-c", "echo $EMU_CXL_DEVICES").strip().split(":")
        assert paths == bed.env(host)["EMU_CXL_DEVICES"].split(":")
        for number, path in enumerate(paths):
            found = python(bed, host, DEVDAX, "read", path, str(4096 * number), "00" * 8)
            assert bytes.fromhex(found) == b"device %d" % number


def test_what_one_host_writes_the_other_and_the_outside_read(bed: Testbed) -> None:
    data = hashlib.sha256(b"pattern").digest() * 9
    for offset in (0x123457, 256 * MIB - len(data)):
        python(bed, "host0", DEVDAX, "write", "/dev/dax2.0", str(offset), data.hex())
        there = python(bed, "host1", DEVDAX, "read", "/dev/dax2.0", str(offset), data.hex())
        assert bytes.fromhex(there) == data
        with Path(bed.devices[2]).open("rb") as device:
            device.seek(offset)
            assert device.read(len(data)) == data


def test_every_region_has_a_numa_node_of_its_own(bed: Testbed) -> None:
    rows = devices_of(bed, "host0")
    assert [row["names"] for row in rows] == [["cxl0"], ["cxl1"], ["cxl2"], ["cxl3"]]
    assert {row["size_bytes"] for row in rows} == {256 * MIB}
    assert len({row["node"] for row in rows}) == 4


# -- programs ---------------------------------------------------------------------------------------------
def test_streams_status_and_environment(bed: Testbed) -> None:
    script = "cat; echo $WORD $EMU_HOST >&2; exit 7"
    done = bed.exec("host1", ["sh", "-c", script], stdin=b"in", env={"WORD": "w"}, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"in", b"w host1\n")
    assert b"w host1" in Path(bed.log_path("host1")).read_bytes()


def test_a_signal_and_a_missing_program_are_told_apart(bed: Testbed) -> None:
    assert bed.exec("host0", ["sh", "-c", "kill -9 $$"], timeout_s=60).returncode == 128 + 9
    done = bed.exec("host0", ["no-such-program"], timeout_s=60)
    assert done.returncode == 127
    assert b"no-such-program" in done.stderr


def test_megabytes_pass_unchanged_both_ways(bed: Testbed) -> None:
    data = os.urandom(3 * MIB + 17)
    done = bed.exec("host0", ["cat"], stdin=data, timeout_s=120)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_a_timeout_kills_the_program_in_the_guest(bed: Testbed) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        bed.exec("host0", ["sleep", "4711"], timeout_s=3)
    _gone(bed, "host0", "sleep 4711")


def test_killing_what_stands_for_a_program_kills_the_program(bed: Testbed) -> None:
    child = bed.spawn("host0", ["sleep", "4712"], stdin=subprocess.DEVNULL)
    _there(bed, "host0", "sleep 4712")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    bed.forget(child.pid)
    _gone(bed, "host0", "sleep 4712")


def test_a_signal_reaches_the_program(bed: Testbed) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    with bed.spawn("host0", ["sh", "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.terminate()
        assert child.stdout.readline() == b"caught\n"
        assert child.wait(60) == 5
    bed.forget(child.pid)


def test_several_programs_at_a_time(bed: Testbed) -> None:
    with ThreadPoolExecutor(5) as pool:
        outputs = pool.map(lambda n: run(bed, "host0", "sh", "-c", f"sleep 1; echo {n}"), range(5))
        assert list(outputs) == [f"{n}\n" for n in range(5)]


def _processes(bed: Testbed, host: str) -> str:
    return run(bed, host, "sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")


def _there(bed: Testbed, host: str, command: str) -> None:
    _wait(lambda: command in _processes(bed, host))


def _gone(bed: Testbed, host: str, command: str) -> None:
    _wait(lambda: command not in _processes(bed, host))


def _wait(condition: object, timeout_s: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_agent_comes_back_after_a_kill(bed: Testbed) -> None:
    before = run(bed, "host1", "sh", "-c", "echo $PPID").strip()
    done = bed.exec("host1", ["sh", "-c", f"kill -9 {before}; sleep 4713"], timeout_s=60)
    assert done.returncode == 127
    assert b"agent was restarted" in done.stderr
    assert run(bed, "host1", "sh", "-c", "echo $PPID").strip() != before
    assert [row["mode"] for row in devices_of(bed, "host1")] == ["devdax"] * 4


# -- files ------------------------------------------------------------------------------------------------
def test_writes_stay_in_the_guest(bed: Testbed, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("from the host")
    words = run(bed, "host0", "sh", "-c", f"cat {tmp_path}/host; echo x > {tmp_path}/guest")
    assert words == "from the host"
    assert not (tmp_path / "guest").exists()


def test_files_go_in_and_out(bed: Testbed, tmp_path: Path) -> None:
    guest = bed.guest("host1")
    assert guest is not None
    data = os.urandom(MIB + 5)
    (tmp_path / "in").write_bytes(data)
    (tmp_path / "in").chmod(0o750)
    put_file(guest, tmp_path / "in", "/run/file")
    assert run(bed, "host1", "stat", "-c", "%a %s", "/run/file") == f"750 {len(data)}\n"
    get_file(guest, "/run/file", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    with pytest.raises(UserError, match="/run/none: No such file"):
        get_file(guest, "/run/none", tmp_path / "none")
    with pytest.raises(UserError, match="No such file"):
        put_file(guest, tmp_path / "in", "/no/such/place")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


# -- soft-RoCE --------------------------------------------------------------------------------------------
def test_rxe_is_active_with_a_large_mtu_and_an_ipv4_gid(bed: Testbed) -> None:
    base = "/sys/class/infiniband/rxe0/ports/1"
    for number, host in enumerate(bed.hosts):
        script = f"cat {base}/state {base}/gids/1 {base}/gid_attrs/types/1"
        state, gid, kind = run(bed, host, "sh", "-c", script).splitlines()
        assert "ACTIVE" in state
        assert gid.endswith(f"ffff:0a4d:{number + 1:04x}")
        assert kind == "RoCE v2"


def test_programs_and_other_programs_environments_name_the_port(bed: Testbed) -> None:
    script = "echo $EMU_RDMA_DEVICE $EMU_RDMA_GID_INDEX"
    assert run(bed, "host1", "sh", "-c", script) == "rxe0 1\n"
    port = rdma_port(bed, "host1")
    assert port == RdmaPort("rxe0", 1)
    assert client_env("ucx", bed.regions, port)["UCX_NET_DEVICES"] == "rxe0:1"
    assert client_env("mooncake", bed.regions, port)["MC_CXL_DEV_PATH"] == "/dev/dax0.0"


def test_native_soft_roce_by_a_real_kernel(bed: Testbed) -> None:
    """A guest is a machine with rdma_rxe: `emu up --rdma native` in it makes a device on lo, down removes it."""
    emu_command = f"{sys.executable} -m emu.cli"
    script = (
        f"export XDG_STATE_HOME=/run/native; cd /; mkdir /run/native; "
        f"{emu_command} up --driver local --rdma native --cxl-devices 1 --device-size 1M "
        "--dir /run/native --name n >&2 && "
        f"{emu_command} env --for ucx --name n && ls /sys/class/infiniband && "
        f"{emu_command} down n >&2; ls /sys/class/infiniband; ls /run/native"
    )
    out = run(bed, "host1", "sh", "-c", script, timeout_s=240).splitlines()
    assert "export EMU_RDMA_DEVICE=emu-n" in out
    assert "export UCX_NET_DEVICES=emu-n:1" in out
    assert out[-4:] == ["emu-n", "rxe0", "rxe0", "emu"]


@contextmanager
def server(bed: Testbed, *argv: str) -> Iterator[None]:
    """A verbs program that waits for its client on host0."""
    with bed.spawn("host0", argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        # it listens on TCP for the exchange of addresses
        _wait(lambda: ":4853" in run(bed, "host0", "cat", "/proc/net/tcp", "/proc/net/tcp6"))
        yield
        assert child.wait(120) == 0
    bed.forget(child.pid)


@pytest.mark.needs("rdma_clients")
@pytest.mark.parametrize(
    "argv",
    [
        ["ibv_rc_pingpong", "-d", "rxe0", "-g", "1", "-n", "20", "-p", "18515", "-c"],
        ["ib_read_bw", "-d", "rxe0", "-x", "1", "-s", "65536", "-n", "10", "-p", "18515"],
    ],
)
def test_unmodified_verbs_programs_reach_the_other_host(bed: Testbed, argv: list[str]) -> None:
    with server(bed, *argv):
        out = run(bed, "host1", *argv, "host0")
    assert "10.77.0.1" in out or "10:77:00:01" in out


@pytest.mark.needs("fio")
def test_fio_writes_in_one_host_and_verifies_in_the_other(bed: Testbed) -> None:
    # devdax maps whole 2 MiB pages only: a smaller --size is EINVAL
    job = [
        "fio",
        "--name=t",
        "--ioengine=dev-dax",
        "--filename=/dev/dax1.0",
        "--size=2M",
        "--bs=64k",
    ]
    job += ["--rw=write", "--verify=crc32c", "--output-format=json"]
    for host, more in (("host0", "--do_verify=0"), ("host1", "--verify_only")):
        result = json.loads(run(bed, host, *job, more))
        assert result["jobs"][0]["error"] == 0
        if more == "--verify_only":
            assert result["jobs"][0]["read"]["io_bytes"] == 2 * MIB
    with Path(bed.devices[1]).open("r+b") as device:  # a changed byte is found: the check can fail
        device.seek(300_000)
        device.write(b"\xff\x00\xff")
    assert bed.exec("host1", [*job, "--verify_only"], timeout_s=120).returncode != 0


# -- the SAC path -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sac_run(bed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SacRun]:
    """`emu run` on the two guests; torch alone takes a minute to import there, so two tests wait for it in turn."""
    for path in bed.devices:  # earlier tests left foreign bytes where the pool's header goes
        with Path(path).open("r+b") as device:
            device.write(bytes(4096))
    out = tmp_path_factory.mktemp("sac")
    command = ["run", "--name", bed.name, "--backend", "cxl", "--model", "tiny", "--json"]
    command += ["--devices", "2", "--gpus", "2", "--requests", "2", "--context", "140"]
    command += ["--output-tokens", "4", "--out", str(out / "out")]
    code = "import sys; from emu.cli import main; main()"
    with (
        (out / "stdout").open("wb") as stdout,
        (out / "stderr").open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", code, *command], stdout=stdout, stderr=stderr
        ) as child,
    ):
        yield SacRun(child, out)
        child.kill()


@dataclass(frozen=True)
class SacRun:
    """A run that goes on.

    Attributes:
        child: the process.
        out: holds what it writes.
    """

    child: subprocess.Popen[bytes]
    out: Path


def _headers(bed: Testbed) -> list[bytes]:
    found = []
    for path in bed.devices[:2]:
        with Path(path).open("rb") as device:
            found.append(device.read(8))
    return found


def test_prefill_in_one_host_makes_the_pool_in_the_devices(bed: Testbed, sac_run: SacRun) -> None:
    def made() -> bool:
        assert sac_run.child.poll() in {None, 0}, (sac_run.out / "stderr").read_text()
        return _headers(bed) == [b"EMUPOOL1"] * 2

    _wait(made, timeout_s=280)


def test_decode_in_the_other_host_gives_every_token_and_byte(sac_run: SacRun) -> None:
    assert sac_run.child.wait(280) == 0, (sac_run.out / "stderr").read_text()
    (result,) = json.loads((sac_run.out / "stdout").read_text())["runs"]
    assert result["backend"] == "cxl"
    assert result["tokens_match"]
    assert result["kv_bytes_match"]
    log = sac_run.out / "out" / "ops-cxl.jsonl"
    assert log.stat().st_size > 0, "written in host1, brought out"


def test_a_design_that_guests_cannot_share_is_refused(bed: Testbed) -> None:
    code = "import sys; from emu.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "--name", bed.name, "--backend", "dram"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "memory that the testbed's guests do not share" in done.stderr


# -- modes and faults -------------------------------------------------------------------------------------
NUMA_STORE = """
import json, sys
import numpy as np
import emu
layout = emu.KVLayout((emu.Component("kv", 1152, (0,)),))
options = emu.StoreOptions(capacity_bytes=1 << 20, numa_node=int(sys.argv[1]))
store = emu.open_store("dram://", layout, options)
rows = np.random.default_rng(1).integers(0, 256, (1, 100, 1152), np.uint8)
store.put(["k"], [{"kv": rows}])
out = np.zeros_like(rows)
store.get(["k"], [{"kv": out}])
stats, equal = store.stats(), bool((out == rows).all())
words = {"node": stats.numa_node, "bound": stats.numa_bound, "reason": stats.numa_reason, "equal": equal}
print(json.dumps(words), flush=True)
input()
"""


def test_a_device_becomes_system_ram_and_devdax_again(bed: Testbed) -> None:
    row = set_mode(bed, "host0", "cxl3", "system-ram")
    assert row["mode"] == "system-ram"
    node = str(row["node"])
    assert run(bed, "host0", "sh", "-c", "echo $EMU_CXL_DEVICES $EMU_CXL_NODES") == (
        f"/dev/dax0.0:/dev/dax1.0:/dev/dax2.0 {node}\n"
    )
    argv = [sys.executable, "-c", NUMA_STORE, node]
    with bed.spawn("host0", argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        stats = json.loads(child.stdout.readline())
        assert (stats["node"], stats["bound"], stats["equal"]) == (int(node), True, True), stats
        with pytest.raises(UserError, match=f"memory of node {node} is in use by process"):
            set_mode(bed, "host0", "cxl3", "devdax")
        child.communicate(b"\n", timeout=60)
    bed.forget(child.pid)
    assert set_mode(bed, "host0", "cxl3", "devdax")["mode"] == "devdax"
    assert devices_of(bed, "host1")[3]["mode"] == "devdax", "the other host was never asked"


def test_a_mapped_device_does_not_become_system_ram(bed: Testbed) -> None:
    hold = "import mmap, os; m = mmap.mmap(os.open('/dev/dax3.0', os.O_RDWR), 4096 * 512); print('ready', flush=True); input()"
    argv = [sys.executable, "-I", "-S", "-c", hold]
    with bed.spawn("host0", argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(UserError, match=r"/dev/dax3\.0 is in use by process"):
            set_mode(bed, "host0", "cxl3", "system-ram")
        child.communicate(b"\n", timeout=60)
    bed.forget(child.pid)


def test_a_link_goes_down_and_up(bed: Testbed) -> None:
    state = "/sys/class/infiniband/rxe0/ports/1/state"
    faults.set_link(bed, "host1", up=False)
    _wait(lambda: "DOWN" in run(bed, "host1", "cat", state))
    assert "ACTIVE" in run(bed, "host0", "cat", state)
    faults.set_link(bed, "host1", up=True)
    _wait(lambda: "ACTIVE" in run(bed, "host1", "cat", state))


def test_a_pulled_device_is_gone_for_one_host_only(bed: Testbed) -> None:
    faults.remove_device(bed, "host1", "cxl3")
    assert [row["mode"] for row in devices_of(bed, "host1")] == ["devdax"] * 3 + ["removed"]
    assert "dax3.0" not in run(bed, "host1", "sh", "-c", "echo $EMU_CXL_DEVICES")
    assert python(bed, "host0", DEVDAX, "read", "/dev/dax3.0", str(4096 * 3), "00" * 8)
    with pytest.raises(UserError, match="no device 'cxl9'"):
        faults.remove_device(bed, "host1", "cxl9")


def test_a_killed_host_leaves_the_pool_and_the_other_host(bed: Testbed) -> None:
    """The last test of this testbed: host1 does not come back."""
    python(bed, "host1", DEVDAX, "write", "/dev/dax0.0", "8192", b"last words".hex())
    faults.kill_host(bed, "host1")
    there = python(bed, "host0", DEVDAX, "read", "/dev/dax0.0", "8192", "00" * 10)
    assert bytes.fromhex(there) == b"last words"
    done = bed.exec("host1", ["true"], timeout_s=60)
    assert done.returncode == 127
    assert b"the guest is gone" in done.stderr
    with pytest.raises(TestbedError, match="host1 is not running"):
        faults.kill_host(bed, "host1")
