"""up makes, down unmakes: what is ours, all of it; what is not, never. Also after kill -9 at every point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emu.errors import EmuError, HostError, TestbedError, WorkerError
from emu.provision import process
from emu.provision.condition import inspect
from emu.provision.facts import default_root, gather_facts
from emu.provision.plan import Plan, make_plan
from emu.provision.process import ProcessId, identify
from emu.provision.runner import ATTACH_LOCK, Runner
from emu.provision.spec import Flags, make_spec
from emu.provision.state import StateDirectory
from emu.provision.steps import StartProcess
from emu.provision.undo import MARKER

if TYPE_CHECKING:
    from conftest import Home

    from emu.provision.state import Record

NODE = (
    "import signal, socket, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1])\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)
"""Stands in for the memory node where only the life of a process matters: it starts faster."""


def plan_for(home: Home, name: str = "lab", node: str | None = NODE, **flags: object) -> Plan:
    chosen = {"cxl_devices": 2, "device_size": "1M", "name": name, **flags}
    spec = make_spec(Flags(**chosen))  # type: ignore[arg-type]
    plan = make_plan(spec, gather_facts(spec, home.run, StateDirectory().testbeds()))
    if node is None:
        return plan
    argv = (sys.executable, "-S", "-c", node, plan.node_socket or "")
    return replace(
        plan,
        steps=tuple(
            replace(step, argv=argv) if isinstance(step, StartProcess) else step
            for step in plan.steps
        ),
    )


def nothing_left(home: Home, record: Record | None = None) -> None:
    assert list(home.run.iterdir()) == []
    locks = [path.name for path in StateDirectory().path.iterdir()]
    assert locks in ([], [f"{ATTACH_LOCK}.lock"])  # of one that was killed while it held it
    assert process.mapping(home.run) == []
    if record is not None:
        assert process.tagged(record.id) == []
        assert not any(process.is_running(entry.process) for entry in record.processes)


def test_up_makes_what_the_plan_says_and_down_leaves_nothing(home: Home) -> None:
    plan = plan_for(home, node=None, hosts=2)
    record = Runner(StateDirectory()).up(plan)
    run_dir = Path(record.run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    for device in record.devices:
        found = Path(device.path).stat()
        assert found.st_size == device.size_bytes
        assert found.st_blocks * 512 >= device.size_bytes, "sparse"
    assert sorted(entry.name for entry in run_dir.iterdir()) == sorted(
        [MARKER, "cxl0", "cxl1", "memory-node.log", "memory-node.sock", "runs"]
        + [f"host{n}.{kind}" for n in (0, 1) for kind in ("env", "log")]
    )
    found_condition = inspect(StateDirectory(), "lab")
    assert (found_condition.state, found_condition.missing) == ("up", ())
    assert [row["role"] for row in found_condition.processes] == ["memory-node"]
    undone = Runner(StateDirectory()).down("lab")
    assert undone.left == []
    assert len(undone.ended) == 1
    nothing_left(home, record)


def test_the_default_root_is_removed_with_its_last_testbed(home: Home) -> None:
    name = f"test-{os.getpid()}"
    spec = make_spec(Flags(cxl_devices=1, device_size="1M", name=name, rdma="off"))
    runner = Runner(StateDirectory())
    record = runner.up(make_plan(spec, gather_facts(spec, None, {})))
    assert record.run_dir == f"{default_root()}/{name}"
    assert default_root().stat().st_mode & 0o077 == 0
    runner.down(name)
    assert not Path(record.run_dir).exists()
    assert not default_root().exists() or any(default_root().iterdir())


def _die_at(point: int, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run up in a child that kills itself at its point-th look at the world; returns its wait status.

    A point is the moment before or after every save of the record: between any two of them lies at most one act.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        seen = 0
        save = StateDirectory.save

        def dying(self: StateDirectory, record: Record) -> None:
            nonlocal seen
            for act in (lambda: None, lambda: save(self, record)):
                act()
                seen += 1
                if seen == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(StateDirectory, "save", dying)
        Runner(StateDirectory()).up(plan)
        os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.mark.parametrize("attach", [False, True])
def test_kill_9_at_every_point_of_up_leaves_what_status_lists_and_down_clears(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attach: bool
) -> None:
    existing = tmp_path / "existing"
    existing.write_bytes(bytes(1 << 20))
    plan = plan_for(home, attach=[str(existing)] if attach else None)
    for point in range(1, 100):
        status = _die_at(point, plan, monkeypatch)
        if status == 0:
            break
        assert os.WIFSIGNALED(status), f"point {point}: up failed by itself"
        state = StateDirectory()
        if not state.names():  # killed before the first record: nothing was touched
            assert list(home.run.iterdir()) == [], point
            continue
        condition = inspect(state, "lab")
        assert condition.state == ("up" if condition.record.phase == "up" else "incomplete")  # type: ignore[union-attr]
        listed = set(condition.remains)
        there = {str(path) for path in home.run.glob("*")} | {
            str(path)
            for path in home.run.glob("*/*")
            if path.name not in {MARKER, "memory-node.sock"}
        }
        assert there == listed, point
        with pytest.raises(TestbedError, match="exists already"):
            Runner(state).up(plan)
        running = {found.pid for found in process.tagged(condition.record.id)}  # type: ignore[union-attr]
        assert running <= set(Runner(state).down("lab").ended), point
        nothing_left(home, condition.record)
    else:
        pytest.fail("up never came to its end")
    assert point > 2 * len(plan.steps)
    record = StateDirectory().load("lab")
    Runner(StateDirectory()).down("lab")
    nothing_left(home, record)
    assert existing.read_bytes() == bytes(1 << 20)


def test_kill_9_at_every_point_of_down_is_finished_by_the_next_down(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDirectory()
    calls = ("unlink", "rmdir", "rename")
    for point in range(1, 100):
        record = Runner(state).up(plan_for(home))
        child = os.fork()
        if child == 0:
            _down_until(point, calls, monkeypatch)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WIFSIGNALED(status), point
        if state.names():
            Runner(state).down("lab")
        for leftover in state.path.iterdir():  # a lock file that nobody holds
            assert leftover.suffix == ".lock"
            leftover.unlink()
        nothing_left(home, record)
    else:
        pytest.fail("down never came to its end")
    assert point > 8
    nothing_left(home, record)


def _down_until(point: int, calls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0

    def dying(original: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal seen
            result = original(*args, **kwargs)  # type: ignore[operator]
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    try:
        for name in calls:
            monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
        Runner(StateDirectory()).down("lab")
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_a_failing_step_undoes_the_others(home: Home) -> None:
    plan = plan_for(home, node="import sys; sys.exit('no luck today')")
    with pytest.raises(WorkerError, match="no luck today") as caught:
        Runner(StateDirectory()).up(plan)
    assert caught.value.exit_status == 1
    nothing_left(home)


def test_an_interrupt_in_the_middle_undoes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Runner(StateDirectory()).up(plan_for(home))
    nothing_left(home)


def test_a_medium_that_is_full_after_all_is_refused_and_undone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostError, match="1 MiB cannot be allocated: No space left"):
        Runner(StateDirectory()).up(plan_for(home))
    nothing_left(home)


def test_a_node_that_dies_is_seen_and_cleared(home: Home) -> None:
    record = Runner(StateDirectory()).up(plan_for(home))
    os.kill(record.processes[0].process.pid, signal.SIGKILL)
    os.waitpid(record.processes[0].process.pid, 0)
    condition = inspect(StateDirectory(), "lab")
    assert (condition.state, condition.missing) == ("damaged", ("process memory-node",))
    Runner(StateDirectory()).down("lab")
    nothing_left(home, record)


def test_two_testbeds_side_by_side_do_not_touch_each_other(home: Home) -> None:
    runner = Runner(StateDirectory())
    first, second = runner.up(plan_for(home, "one")), runner.up(plan_for(home, "two"))
    Path(second.devices[0].path).write_bytes(b"mine" * 1024)
    before = Path(second.devices[0].path).stat().st_ino
    runner.down("one")
    assert not Path(first.run_dir).exists()
    assert inspect(StateDirectory(), "two").state == "up"
    assert Path(second.devices[0].path).read_bytes()[:4] == b"mine"
    assert Path(second.devices[0].path).stat().st_ino == before
    runner.down("two")
    nothing_left(home, second)


def test_foreign_files_stay_and_are_named(home: Home) -> None:
    runner = Runner(StateDirectory())
    run_dir = Path(runner.up(plan_for(home)).run_dir)
    (run_dir / "notes.txt").write_text("keep me")
    (run_dir / "cxl0.backup").write_text("keep me too")
    (run_dir / "cxl0.directory").write_text("a store made this: it goes")
    undone = runner.down("lab")
    assert sorted(undone.left) == [
        f"{run_dir}/cxl0.backup: emu did not make it",
        f"{run_dir}/notes.txt: emu did not make it",
    ]
    assert sorted(path.name for path in run_dir.iterdir()) == ["cxl0.backup", "notes.txt"]
    assert StateDirectory().names() == []
    with pytest.raises(TestbedError, match="exists and belongs to no testbed"):
        plan_for(home)


def test_a_device_that_somebody_replaced_stays(home: Home) -> None:
    runner = Runner(StateDirectory())
    record = runner.up(plan_for(home))
    device = Path(record.devices[0].path)
    other = device.with_name("other")
    other.write_text("not ours")
    other.rename(device)
    assert inspect(StateDirectory(), "lab").state == "damaged"
    undone = runner.down("lab")
    assert undone.left == [f"{device}: emu did not make it"]
    assert device.read_text() == "not ours"


def test_a_run_directory_that_somebody_replaced_stays(home: Home) -> None:
    runner = Runner(StateDirectory())
    run_dir = Path(runner.up(plan_for(home)).run_dir)
    moved = run_dir.with_name("moved")
    run_dir.rename(moved)
    run_dir.mkdir()
    (run_dir / "cxl0").write_text("not ours")
    undone = runner.down("lab")
    assert undone.left == [f"{run_dir}: not the directory that up made"]
    assert (run_dir / "cxl0").read_text() == "not ours"
    assert (moved / "cxl0").exists()


def edit(name: str, change: dict[str, object]) -> None:
    path = StateDirectory().record_path(name)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_after_a_reboot_files_go_and_recorded_pids_are_nobodys(home: Home) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        record = Runner(StateDirectory()).up(plan_for(home, rdma="off"))
        found = identify(bystander.pid)
        assert found is not None
        entry = {
            "process": {"pid": found.pid, "start_time": found.start_time},
            "role": "x",
            "host": "host0",
        }
        edit("lab", {"boot_id": "an-earlier-boot", "processes": [entry]})
        assert inspect(StateDirectory(), "lab").state == "rebooted"
        assert Runner(StateDirectory()).down("lab").ended == []
        assert bystander.poll() is None, "a pid of another boot was ended"
        nothing_left(home, replace(record, processes=[]))
    finally:
        bystander.kill()
        bystander.wait()


def test_after_a_reboot_an_unmarked_directory_of_the_same_inode_stays(home: Home) -> None:
    run_dir = Path(Runner(StateDirectory()).up(plan_for(home, rdma="off")).run_dir)
    edit("lab", {"boot_id": "an-earlier-boot"})
    (run_dir / MARKER).write_text("somebody else's")
    undone = Runner(StateDirectory()).down("lab")
    assert undone.left == [f"{run_dir}: not the directory that up made"]
    assert (run_dir / "cxl0").stat().st_size == 1 << 20


def test_a_reused_pid_is_not_ended(home: Home) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        Runner(StateDirectory()).up(plan_for(home, rdma="off"))
        entry = {"process": {"pid": bystander.pid, "start_time": 1}, "role": "x", "host": "host0"}
        edit("lab", {"processes": [entry]})
        assert Runner(StateDirectory()).down("lab").ended == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_second_up_of_a_name_waits_for_nobody_and_breaks_nothing(home: Home) -> None:
    state = StateDirectory()
    plan = plan_for(home)
    with state.lock("lab"), pytest.raises(TestbedError, match="is being changed by another emu"):
        Runner(state).up(plan)
    nothing_left(home)


def test_a_damaged_record_is_said_and_left_alone(home: Home) -> None:
    record = Runner(StateDirectory()).up(plan_for(home, rdma="off"))
    path = StateDirectory().record_path("lab")
    good = path.read_bytes()
    for bad in (
        good[:100],
        b"[]",
        b"{}",
        b"\xff",
        good.replace(b"cxl_devices", b"x").replace(b'"id"', b'"di"'),
    ):
        path.write_bytes(bad)
        condition = inspect(StateDirectory(), "lab")
        assert condition.state == "unreadable"
        assert str(path) in condition.problem
        with pytest.raises(TestbedError, match="cannot be read"):
            Runner(StateDirectory()).down("lab")
        assert path.read_bytes() == bad
    path.write_bytes(good)
    Runner(StateDirectory()).down("lab")
    nothing_left(home, record)


def test_a_state_directory_that_cannot_be_made_is_one_clear_error(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a-file").touch()
    plan = plan_for(home)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a-file"))
    with pytest.raises(EmuError, match="XDG_STATE_HOME"):
        Runner(StateDirectory()).up(plan)
    assert list(home.run.iterdir()) == []
    monkeypatch.setenv("XDG_STATE_HOME", str(home.state))


def test_terminate_ends_what_ignores_sigterm(home: Home) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"on\n"
    found = identify(child.pid)
    assert found is not None
    assert process.terminate([found], grace_s=0.1) == []
    assert identify(child.pid) is None
    child.stdout.close()
    child.wait()


def test_terminate_never_signals_another_process_of_that_pid() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert process.terminate([ProcessId(child.pid, 1)], grace_s=0.1) == []
        time.sleep(0.05)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_mapping_that_emu_did_not_make_is_named(home: Home) -> None:
    record = Runner(StateDirectory()).up(plan_for(home, rdma="off"))
    code = (
        "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0)\n"
        "print('on', flush=True); time.sleep(600)"
    )
    argv = [sys.executable, "-S", "-c", code, record.devices[0].path]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        undone = Runner(StateDirectory()).down("lab")
        assert undone.left == [
            f"process {child.pid} still maps files of {record.run_dir}; emu did not start it"
        ]
        assert child.poll() is None
        assert list(home.run.iterdir()) == []
    finally:
        child.kill()
        child.communicate()


def test_what_killed_runs_left_is_listed_and_goes_with_the_testbed(home: Home) -> None:
    runner = Runner(StateDirectory())
    run_dir = Path(runner.up(plan_for(home, rdma="off")).run_dir)
    left = run_dir / "runs" / "1-1"
    left.mkdir()
    (left / "shard").write_bytes(b"x")
    assert str(left) in inspect(StateDirectory(), "lab").remains
    assert runner.down("lab").left == []
    nothing_left(home)


def test_a_scratch_directory_that_somebody_replaced_stays(home: Home) -> None:
    runner = Runner(StateDirectory())
    run_dir = Path(runner.up(plan_for(home, rdma="off")).run_dir)
    (run_dir / "runs").rename(run_dir / "moved")
    (run_dir / "runs").mkdir()
    (run_dir / "runs" / "notes").write_text("not ours")
    undone = runner.down("lab")
    assert f"{run_dir}/runs: emu did not make it" in undone.left
    assert (run_dir / "runs" / "notes").read_text() == "not ours"
