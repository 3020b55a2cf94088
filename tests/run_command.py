"""`emu` as users call it, and what its commands leave behind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Home

T = TypeVar("T")
QUICK = "--requests 2 --context 300 --output-tokens 3"


def argv(command: str) -> list[str]:
    return [sys.executable, "-m", "emu.cli", *shlex.split(command)]


def emu(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(command), capture_output=True, text=True, timeout=900, check=False)


def figures(home: Home, options: str) -> dict[str, dict[str, Any]]:
    """`emu run --json` by backend; without --name on an ephemeral testbed below home.run."""
    place = "" if "--name" in options else f"--dir {home.run}"
    done = emu(f"run {options} {place} --json")
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["schema_version"] == 1
    return {run["backend"]: run for run in out["runs"]}


def is_exact(run: dict[str, Any]) -> bool:
    return bool(run["tokens_match"] and run["kv_bytes_match"])


def leftovers(home: Home) -> list[str]:
    """Records, files and processes of testbeds and workers that a command of this test left."""
    files = [str(path) for path in home.state.rglob("*.json")]
    files += [str(path) for path in home.run.iterdir()]
    return files + [f"pid {pid}" for pid in worker_pids(home)]


def worker_pids(home: Home, role: str = "") -> list[int]:
    """Workers and memory nodes that descend from this test's commands: their state directory says so."""
    mark = b"XDG_STATE_HOME=" + os.fsencode(home.state)
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = b"emu.sac.worker" in words or b"backends.memory_node" in words
        if ours and mark in environment and role.encode() in b" ".join(words):
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], T], timeout_s: float = 300.0) -> T:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def one_line(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """It failed with that status, saying these words; in one line, but for click's usage errors."""
    assert done.returncode == status, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 or status == 2, done.stderr
    for word in words:
        assert word in done.stderr
