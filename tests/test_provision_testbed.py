"""The Python API: a testbed in a with block, programs run in it, found again by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import emu
from emu.errors import TestbedError, UserError
from emu.provision import process
from emu.provision.condition import inspect
from emu.provision.runner import Runner
from emu.provision.state import StateDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Home

    from emu import Testbed


@pytest.fixture
def lab(home: Home) -> Iterator[Testbed]:
    with emu.testbed(
        2, hosts=2, device_size="1M", name="lab", directory=home.run, rdma="off", coherence="none"
    ) as testbed:
        yield testbed


def test_a_with_block_makes_and_removes(home: Home) -> None:
    with emu.testbed(
        cxl_devices=2, hosts=2, device_size="1M", directory=home.run, rdma="off"
    ) as testbed:
        assert testbed.name == f"run-{os.getpid()}"
        assert testbed.hosts == ("host0", "host1")
        assert [Path(path).stat().st_size for path in testbed.devices] == [1 << 20, 1 << 20]
        assert (testbed.profile, testbed.coherence, testbed.driver) == ("sac-server", "bi", "local")
        assert testbed.node_socket is None
        assert emu.Testbed.find(testbed.name).devices == testbed.devices
        with emu.testbed(1, device_size="1M", directory=home.run, rdma="off") as second:
            assert second.name == f"run-{os.getpid()}-2"
    assert list(home.run.iterdir()) == []
    assert StateDirectory().names() == []


def test_an_exception_in_the_block_takes_it_down_too(home: Home) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        emu.testbed(1, device_size="1M", directory=home.run, rdma="off"),
    ):
        raise ZeroDivisionError
    assert list(home.run.iterdir()) == []
    assert StateDirectory().names() == []


def test_a_testbed_taken_down_by_somebody_else_is_no_error(home: Home) -> None:
    with emu.testbed(1, device_size="1M", directory=home.run, rdma="off") as testbed:
        Runner(StateDirectory()).down(testbed.name)
    assert list(home.run.iterdir()) == []


def test_an_owner_killed_leaves_what_status_calls_abandoned(home: Home) -> None:
    child = os.fork()
    if child == 0:
        try:
            with emu.testbed(1, device_size="1M", name="lab", directory=home.run, rdma="off"):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    condition = inspect(StateDirectory(), "lab")
    assert condition.state == "abandoned"
    assert f"{home.run}/lab/cxl0" in condition.remains
    Runner(StateDirectory()).down("lab")
    assert list(home.run.iterdir()) == []


def test_env_names_the_pool(lab: Testbed) -> None:
    assert lab.env("host1") == {
        "EMU_TESTBED": "lab",
        "EMU_HOST": "host1",
        "EMU_CXL_DEVICES": ":".join(lab.devices),
    }
    with pytest.raises(UserError, match=r"no host 'host9' \(did you mean 'host"):
        lab.env("host9")


def test_exec_gives_status_streams_and_environment(lab: Testbed) -> None:
    script = 'printf "%s " "$EMU_HOST"; cat; echo oops >&2; exit 3'
    done = lab.exec("host1", ["sh", "-c", script], stdin=b"from stdin")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"host1 from stdin", b"oops\n")
    log = Path(lab.run_dir, "host1.log").read_bytes()
    assert b"host1 from stdin" in log
    assert b"oops" in log
    assert Path(lab.run_dir, "host0.log").read_bytes() == b""
    assert lab.exec("host0", ["sh", "-c", "kill -9 $$"]).returncode == 137
    assert lab.exec("host0", ["cat"]).stdout == b""
    assert StateDirectory().load("lab").processes == []


def test_exec_passes_more_than_a_pipe_holds(lab: Testbed) -> None:
    data = os.urandom(1 << 20)
    assert lab.exec("host0", ["cat"], stdin=data).stdout == data


def test_exec_does_not_wait_for_what_a_program_left_behind(lab: Testbed) -> None:
    done = lab.exec("host0", ["sh", "-c", "sleep 600 & echo started"], timeout_s=60)
    assert done.stdout == b"started\n"
    left = process.tagged(lab.record.id)
    assert len(left) == 1
    assert inspect(StateDirectory(), "lab").processes[0]["pid"] == left[0].pid
    Runner(StateDirectory()).down("lab")
    assert not process.is_running(left[0])


def test_exec_ends_at_its_timeout(lab: Testbed) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        lab.exec("host0", ["sh", "-c", "echo first; exec sleep 600"], timeout_s=0.5)
    assert caught.value.stdout == b"first\n"
    assert process.tagged(lab.record.id) == []
    assert StateDirectory().load("lab").processes == []


def test_a_program_that_is_not_there_is_a_clear_error(lab: Testbed) -> None:
    with pytest.raises(UserError, match="'no-such-program' cannot be run"):
        lab.exec("host0", ["no-such-program"])
    assert StateDirectory().load("lab").processes == []


def test_down_ends_what_runs_in_the_testbed_and_its_children(lab: Testbed) -> None:
    script = "sleep 600 & (trap '' TERM; sleep 600 & wait) & wait"
    with lab.spawn("host0", ["sh", "-c", script]) as child:
        deadline = time.monotonic() + 30
        while len(process.tagged(lab.record.id)) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        running = process.tagged(lab.record.id)
        assert len(running) >= 4
        Runner(StateDirectory()).down("lab")
        assert not any(map(process.is_running, running))
        assert child.poll() is not None
    assert not Path(lab.run_dir).exists()


def test_down_from_inside_is_refused_and_harms_nothing(lab: Testbed) -> None:
    down = [sys.executable, "-c", "from emu.cli import main; main()", "down"]
    done = lab.exec("host0", down)
    assert done.returncode == 1
    assert b"this command runs in testbed 'lab' itself" in done.stderr
    assert inspect(StateDirectory(), "lab").state == "up"


def test_find_without_a_name(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def up(name: str, owner: bool = False) -> None:
        from emu.provision.facts import gather_facts
        from emu.provision.plan import make_plan
        from emu.provision.spec import Flags, make_spec

        spec = make_spec(Flags(cxl_devices=1, device_size="1M", name=name, rdma="off"))
        plan = make_plan(spec, gather_facts(spec, home.run, {}))
        Runner(StateDirectory()).up(plan, owner=process.identify(os.getpid()) if owner else None)

    with pytest.raises(TestbedError, match=r"no testbed 'default'.*emu up"):
        emu.Testbed.find()
    up("one")
    up("mine", owner=True)
    assert emu.Testbed.find().name == "one"
    up("two")
    with pytest.raises(TestbedError, match=r"several testbeds.*one, two"):
        emu.Testbed.find()
    monkeypatch.setenv("EMU_TESTBED", "two")
    assert emu.Testbed.find().name == "two"
    monkeypatch.delenv("EMU_TESTBED")
    up("default")
    assert emu.Testbed.find().name == "default"
    with pytest.raises(
        TestbedError, match=r"no testbed 'three' \(there are default, mine, one, two"
    ):
        emu.Testbed.find("three")
    with pytest.raises(UserError, match="not a testbed name"):
        emu.Testbed.find("../../etc/passwd")


def test_the_public_names_are_loaded_on_first_use() -> None:
    code = "import sys, emu\nassert 'numpy' not in sys.modules\nfor name in emu.__all__: getattr(emu, name)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = emu.nonsense


def test_a_workspace_is_ones_own_and_those_of_the_dead_go(lab: Testbed) -> None:
    runs = Path(lab.run_dir, "runs")
    own = process.identify(os.getpid())
    parent = process.identify(os.getppid())
    assert own is not None
    assert parent is not None
    living = runs / f"{parent.pid}-{parent.start_time}"
    for left in (living, runs / f"{own.pid}-1", runs / "notes"):
        left.mkdir()
    with lab.workspace() as path:
        assert path == runs / f"{own.pid}-{own.start_time}"
        assert sorted(runs.iterdir()) == sorted([path, living, runs / "notes"])
        (path / "file").touch()
    assert sorted(runs.iterdir()) == sorted([living, runs / "notes"])


def test_a_flag_that_there_is_not_is_named_with_the_closest(home: Home) -> None:
    with (
        pytest.raises(UserError, match=r"no flag 'device_sise' \(did you mean 'device_size'\?\)"),
        emu.testbed(2, directory=home.run, device_sise="1M"),
    ):
        raise AssertionError
    assert list(home.run.iterdir()) == []
