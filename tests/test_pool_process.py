"""Which process is alive: not a zombie, not another one with the same pid, not one of another boot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from emu.pool.process import Process


def stat_fields(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def describe(pid):
    fields = stat_fields(pid)
    return replace(Process.current(), pid=pid, start_time=int(fields[19]))


def test_this_process_is_alive():
    assert Process.current().pid == os.getpid()
    assert Process.current().alive()
    assert describe(os.getpid()) == Process.current()


def test_a_killed_child_is_dead_before_and_after_it_is_reaped():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        process = describe(child.pid)
        assert process.alive()
        child.send_signal(signal.SIGSTOP)
        assert process.alive()  # stopped is not dead
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert stat_fields(child.pid)[0] == "Z"
        assert not process.alive()
        child.wait()
        assert not process.alive()


def test_another_process_with_the_same_pid_is_not_it():
    assert not replace(Process.current(), start_time=Process.current().start_time + 1).alive()


def test_a_process_of_another_boot_is_dead():
    assert not replace(Process.current(), boot="another").alive()


def test_a_process_of_another_namespace_cannot_be_judged_and_counts_as_alive():
    assert replace(Process.current(), namespace="pid:[1]", pid=1 << 30).alive()
