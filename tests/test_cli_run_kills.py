"""Signals to `emu run` and to each of its processes: one line, nothing left, and the testbed stays usable."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from run_command import QUICK, argv, emu, figures, is_exact, leftovers, wait_for, worker_pids

from emu.errors import EmuError
from emu.pool.inspect import inspect

if TYPE_CHECKING:
    from conftest import Home

LONG = "--backend cxl --requests 4 --context 1024 --output-tokens 900"


def _heed_signals() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and children inherit that."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_signals,
    )


def published(device: Path) -> int:
    """Requests that a device's pool holds as published."""
    with suppress(EmuError):  # not formatted yet, or between two lines of a transaction
        return sum(one.state == "published" for one in inspect(str(device)).requests)
    return 0


def all_ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture
def bed(home: Home) -> Path:
    """A standing testbed with one device; the device."""
    size = "--cxl-devices 1 --device-size 64M --rdma off"
    assert emu(f"up {size} --name bed --dir {home.run}").returncode == 0
    return home.run / "bed" / "cxl0"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode", "oracle"])
def test_a_killed_worker_is_one_line_and_the_testbed_stays_usable(
    home: Home, bed: Path, role: str
) -> None:
    before = figures(home, f"--backend cxl --round 1 --name bed {QUICK}")
    with start(f"run --name bed {LONG}") as run:
        wait_for(lambda: published(bed) == 4)  # the decode instance reads the pool
        workers = worker_pids(home)
        os.kill(worker_pids(home, role)[0], signal.SIGKILL)
        out, err = run.communicate(timeout=300)
    assert (run.returncode, out) == (1, "")
    assert len(err.strip().splitlines()) == 1, err
    assert f"the {role} process was killed by signal 9" in err
    wait_for(lambda: all_ended(workers))
    assert figures(home, f"--backend cxl --round 1 --name bed {QUICK}") == before
    assert emu("down bed").returncode == 0
    assert leftovers(home) == []


@pytest.mark.slow
def test_a_killed_memory_node_is_one_line(home: Home) -> None:
    long = LONG.replace("cxl", "rdma-sparse")
    with start(f"run --dir {home.run} {long}") as run:
        node = wait_for(lambda: worker_pids(home, "memory_node"))[0]
        os.kill(node, signal.SIGKILL)
        out, err = run.communicate(timeout=300)
    assert (run.returncode, out) == (1, "")
    assert len(err.strip().splitlines()) == 1, err
    assert leftovers(home) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_command_undoes_what_it_began(home: Home, number: signal.Signals) -> None:
    with start(f"run --dir {home.run} {LONG}") as run:
        wait_for(lambda: len(worker_pids(home)) == 3)
        run.send_signal(number)
        _, err = run.communicate(timeout=300)
    assert run.returncode not in {0, -number}
    assert "Traceback" not in err
    assert leftovers(home) == []


@pytest.mark.slow
def test_kill_9_of_the_command_ends_its_workers(home: Home, bed: Path) -> None:
    before = figures(home, f"--backend cxl --round 1 --name bed {QUICK}")
    with start(f"run --name bed {LONG}") as run:
        wait_for(lambda: published(bed) == 4)
        workers = worker_pids(home)
        run.kill()
    assert len(workers) == 3
    wait_for(lambda: all_ended(workers))
    assert figures(home, f"--backend cxl --round 1 --name bed {QUICK}") == before
    assert emu("down bed").returncode == 0
    assert leftovers(home) == []


@pytest.mark.slow
def test_what_kill_9_leaves_of_an_ephemeral_testbed_is_listed_and_cleared(home: Home) -> None:
    with start(f"run --dir {home.run} {LONG}") as run:
        wait_for(lambda: len(worker_pids(home)) == 3)
        run.kill()
    wait_for(lambda: not worker_pids(home))
    assert "abandoned" in emu("status").stdout
    assert is_exact(figures(home, f"--backend cxl {QUICK}")["cxl"])  # it is in nobody's way
    assert emu("down --all").returncode == 0
    assert leftovers(home) == []
