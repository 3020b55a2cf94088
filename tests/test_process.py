"""Which process is alive: not a zombie, not another one with the same pid, not one of another boot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

from memory_nodes import wait_until

from emu.process import ProcessId, identify
from emu.provision.process import terminate


def stat_fields(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_this_process_is_alive():
    assert ProcessId.current().pid == os.getpid()
    assert ProcessId.current().alive()
    assert identify(os.getpid()) == ProcessId.current()


def test_a_killed_child_is_dead_before_and_after_it_is_reaped():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        process = identify(child.pid)
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
    assert not replace(ProcessId.current(), start_time=ProcessId.current().start_time + 1).alive()


def test_a_process_of_another_boot_is_dead():
    assert not replace(ProcessId.current(), boot="another").alive()


def test_a_process_of_another_namespace_cannot_be_judged_and_counts_as_alive():
    assert replace(ProcessId.current(), namespace="pid:[1]", pid=1 << 30).alive()


def test_a_main_thread_that_ended_before_its_process_has_not_ended():
    program = """
        import ctypes, threading, time
        threading.Thread(target=time.sleep, args=(600,)).start()
        print(flush=True)
        ctypes.CDLL(None).syscall(60, 0)  # exit(2) of this thread alone
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            process = ProcessId(child.pid, int(stat_fields(child.pid)[19]))
            assert wait_until(lambda: stat_fields(child.pid)[0] == "Z")
            assert process.alive()
        finally:
            child.kill()
        child.wait()
        assert not process.alive()


def test_what_lives_in_another_namespace_is_not_signalled():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        try:
            foreign = replace(identify(child.pid), namespace="pid:[1]")
            assert terminate([foreign], grace_s=0.1) == [foreign]
            assert child.poll() is None
        finally:
            child.kill()
