"""Which process is alive: not a zombie, not another one with the same pid, not one of another boot."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from memory_nodes import wait_until

from emu import process as process_module
from emu.errors import HostError
from emu.process import ProcessId, identify, state
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
    assert not replace(ProcessId.current(), start_time=ProcessId.current().start_time + 2).alive()


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


def failing(number):
    def read_bytes(path):
        raise OSError(number, os.strerror(number), str(path))

    return read_bytes


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "EACCES", "EPERM", "EIO", "ENOENT"])
def test_who_cannot_be_looked_up_is_not_dead(monkeypatch, name):
    own = ProcessId.current()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", failing(getattr(errno, name)))
        assert own.alive()
        assert state(own.pid) == "?"
        with pytest.raises(OSError, match=os.strerror(getattr(errno, name))):
            identify(own.pid)
        with pytest.raises(HostError, match="cannot look itself up"):
            ProcessId.current()
    assert own.alive()


def test_who_has_ended_is_dead_also_where_proc_hides_processes(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = identify(child.pid) or ProcessId(child.pid, 0)
    monkeypatch.setattr(Path, "read_bytes", failing(errno.ENOENT))
    assert not process.alive()
    assert identify(process.pid) is None


def test_processes_are_the_same_from_another_time_namespace(monkeypatch):
    """As seen by `unshare -T --boottime 100000`: /proc adds the reader's offset to every start time."""
    own, parent = ProcessId.current(), identify(os.getppid())
    offset_s = 100_000
    read_bytes, read_text = Path.read_bytes, Path.read_text

    def shifted_bytes(path):
        raw = read_bytes(path)
        if path.name != "stat":
            return raw
        before, _, after = raw.rpartition(b")")
        fields = after.split()
        fields[19] = b"%d" % (int(fields[19]) + offset_s * os.sysconf("SC_CLK_TCK"))
        return before + b") " + b" ".join(fields)

    def offsets(path, *args, **kwargs):
        if path.name != "timens_offsets":
            return read_text(path, *args, **kwargs)
        return f"monotonic           0         0\nboottime       {offset_s}         0\n"

    monkeypatch.setattr(Path, "read_bytes", shifted_bytes)
    assert not own.alive()  # without the offset it would be another process
    monkeypatch.setattr(Path, "read_text", offsets)
    assert own.alive()
    assert (ProcessId.current(), identify(os.getppid())) == (own, parent)


@pytest.mark.parametrize(
    ("text", "ticks"),
    [
        ("monotonic  1  0\nboottime  0  0\n", 0),
        ("monotonic  0  0\nboottime  -3  0\n", -3),
        ("boottime  2  500000000\n", 2.5),
        ("", 0),
    ],
)
def test_the_offset_of_a_time_namespace(monkeypatch, text, ticks):
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert process_module._boottime_offset_ticks() == ticks * os.sysconf("SC_CLK_TCK")
