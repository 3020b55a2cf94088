"""down leaves alone what is not ours: foreign files, replaced devices, reused pids."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emu.errors import TestbedError
from emu.provision import process
from emu.provision.condition import inspect
from emu.provision.facts import gather_facts
from emu.provision.plan import make_plan
from emu.provision.process import ProcessId, identify
from emu.provision.runner import Runner
from emu.provision.spec import Flags, make_spec
from emu.provision.state import StateDirectory
from emu.provision.undo import MARKER

if TYPE_CHECKING:
    from conftest import Home


from made_testbeds import edit, nothing_left, plan_for


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


def test_an_existing_device_is_never_removed(home: Home, tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.write_bytes(b"data" * (1 << 18))
    file = tmp_path / "spec.toml"
    file.write_text(f'[[device]]\npath = "{device}"\n[rdma]\nmode = "off"\n')
    spec = make_spec(Flags(name="lab"), file)
    runner = Runner(StateDirectory())
    record = runner.up(make_plan(spec, gather_facts(spec, home.run, ())))
    assert [d.path for d in record.devices] == [str(device)]
    runner.down("lab")
    assert device.read_bytes() == b"data" * (1 << 18)
    nothing_left(home, record)


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


def test_a_scratch_directory_that_somebody_replaced_stays(home: Home) -> None:
    runner = Runner(StateDirectory())
    run_dir = Path(runner.up(plan_for(home, rdma="off")).run_dir)
    (run_dir / "runs").rename(run_dir / "moved")
    (run_dir / "runs").mkdir()
    (run_dir / "runs" / "notes").write_text("not ours")
    undone = runner.down("lab")
    assert f"{run_dir}/runs: emu did not make it" in undone.left
    assert (run_dir / "runs" / "notes").read_text() == "not ours"
