"""Real verbs in guests: the store's contract over soft-RoCE, and what happens when the network between hosts is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import private_home
from contract_base import DEVICE_BYTES

import emu
from emu.provision import faults
from emu.registry import server_argv

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from emu import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.needs("qemu", "cxl_type3", "guest_kernel")]

ROOT = Path(__file__).parents[1]
NODE = "host0:7471"
TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with (
        pytest.MonkeyPatch.context() as patch,
        private_home(tmp_path_factory.mktemp("guests"), patch) as home,
        emu.testbed(2, hosts=2, driver="qemu", name="v", directory=home.run) as testbed,
    ):
        yield testbed


@contextmanager
def node(bed: Testbed, *options: str) -> Iterator[None]:
    """A memory node in host0, for clients in host1."""
    argv = server_argv("rdma", "/run/node.sock", DEVICE_BYTES)
    command = [*argv, "--listen", NODE, *options]
    with bed.spawn("host0", command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield
        child.terminate()
        child.wait(60)
    bed.forget(child.pid)


def run_tests(bed: Testbed, host: str, *arguments: str, env: Mapping[str, str] = {}) -> str:
    """Run tests of this folder in a guest; a capability that is missing there is a failure."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]
    command += ["--need", "verbs", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"]
    command += [str(ROOT / "tests" / "test_rdma_verbs.py"), *arguments]
    done = bed.exec(host, command, env=env, timeout_s=1500)
    text = done.stdout.decode()
    assert done.returncode == 0, text[-6000:] + done.stderr.decode()[-2000:]
    return text


def test_the_contract_and_the_faults_in_one_host(bed: Testbed) -> None:
    assert "passed" in run_tests(bed, "host0", "-k", "not AcrossHosts")


def test_the_contract_between_hosts_with_a_cxl_device_as_the_memory(bed: Testbed) -> None:
    """The rows are written by RDMA into host0's device and compared in host1 by loads from it."""
    env = {"EMU_TEST_NODE": NODE, "EMU_TEST_DEVICE": "/dev/dax1.0"}
    with node(bed, "--device", "/dev/dax1.0"):
        assert "passed" in run_tests(bed, "host1", "-k", "AcrossHosts", env=env)


def test_prefill_in_one_host_decode_in_the_other_by_rdma(bed: Testbed) -> None:
    code = "import sys; from emu.cli import main; main()"
    command = ["run", "--name", bed.name, "--backend", "cxl,rdma", "--model", "tiny", "--json"]
    command += ["--requests", "2", "--context", "140", "--output-tokens", "4"]
    command += ["--devices", "2", "--gpus", "2"]
    for path in bed.devices:
        with Path(path).open("r+b") as device:
            device.write(bytes(4096))
    argv = [sys.executable, "-c", code, *command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stderr
    cxl, rdma = json.loads(done.stdout)["runs"]
    for result in (cxl, rdma):
        assert (result["tokens_match"], result["kv_bytes_match"]) == (True, True)
    assert rdma["transport"] == "verbs"


CUT = """
import sys, time
import numpy as np
from backends.node_connection import ConnectionOptions, NodeConnection
from emu import _native
options = ConnectionOptions(transport="verbs", timeout_s=float(sys.argv[2]))
connection = NodeConnection(sys.argv[1], options)
memory, staging = connection.register(1 << 20)
rkey = connection.expose(0, connection.size_bytes)
requester = _native.Requester(connection.queue_pair, rkey, staging)
requester.read(0, np.empty(64, np.uint8))
print("ready", flush=True)
input()
began = time.monotonic()
for _ in range(2):
    try:
        requester.read(0, np.empty(64, np.uint8))
    except _native.WorkFault as fault:
        print(fault.args[0], flush=True)
print(time.monotonic() - began, flush=True)
"""


def test_a_cut_network_is_an_error_within_the_timeout(bed: Testbed) -> None:
    """Nothing says that the other host is gone: only the device's retries."""
    argv = [sys.executable, "-c", CUT, NODE, str(TIMEOUT_S)]
    with (
        node(bed),
        bed.spawn("host1", argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"ready\n"
        faults.set_link(bed, "host0", up=False)
        out, _ = child.communicate(b"\n", timeout=120)
        faults.set_link(bed, "host0", up=True)
    bed.forget(child.pid)
    first, second, took_s = out.decode().split()
    assert (first, second) == ("IBV_WC_RETRY_EXC_ERR", "IBV_WC_WR_FLUSH_ERR")
    assert float(took_s) < 10 * TIMEOUT_S
