"""`emu run` as users call it: every design exact, the orderings that the model must give, bad input, kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation.jsonl"
QUICK = ("--requests", "2", "--context", "300", "--output-tokens", "3")


def emu(*argv: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "emu.cli", *argv],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def figures(*argv: str) -> dict[str, dict[str, Any]]:
    done = emu("run", *argv, "--json")
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["schema_version"] == 1
    return {run["backend"]: run for run in out["runs"]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The real trace where it is there, else one of the same shape."""
    if DATA.exists():
        return DATA
    path = tmp_path / "trace.jsonl"
    assert emu("trace", "generate", "--requests", "8", "--out", str(path)).returncode == 0
    return path


def leftovers(home) -> list[str]:
    """Files of testbeds and processes of workers that a command left."""
    files = [str(path) for path in home.state.rglob("*.json")] + [
        str(path) for path in home.run.iterdir()
    ]
    return files + [f"pid {pid}" for pid in worker_pids()]


def worker_pids(role: str = "", parent: int | None = None) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            status = (entry / "status").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        ours = b"emu.sac.worker" in argv or b"backends.memory_node" in argv
        if ours and role.encode() in b" ".join(argv) and f"PPid:\t{parent}\n" in status:
            found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_every_design_is_exact_and_takes_the_sparse_path(home, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ("--trace", str(trace), "--requests", "8", "--context", "2048", "--output-tokens", "16")
    runs = figures(
        "--backend", "dram,cxl,rdma,rdma-sparse,rdma-gather,hbm", *argv, "--out", str(out)
    )
    assert list(runs) == ["dram", "cxl", "rdma", "rdma-sparse", "rdma-gather", "hbm"]
    for name, run in runs.items():
        assert (run["tokens_match"], run["kv_bytes_match"]) == (True, True), name
        assert run["clock"] == {"mode": "virtual", "profile": "sac-server", "dilation": None}
        assert run["output_tokens"] == 8 * 16
        if name != "hbm":
            assert run["rows_missed"] > 0
            assert run["rows_evicted"] > 0
            assert 0 < run["hot_hit_rate"] < 1
            assert 0 < run["bytes_before_first_token"] < run["bytes_fetched"]
        assert 0 < run["kv_touched_fraction"] < 1
    ttft = {name: run["ttft_ms"]["p50"] for name, run in runs.items()}
    ttft_bytes = {name: run["ttft_transfer_ms"]["p50"] for name, run in runs.items()}
    tbt_bytes = {name: run["tbt_transfer_ms"]["p50"] for name, run in runs.items()}
    assert ttft["dram"] <= ttft["cxl"] < ttft["rdma"]
    assert ttft_bytes["rdma"] >= 3 * ttft_bytes["cxl"]
    assert tbt_bytes["rdma-sparse"] >= 3 * tbt_bytes["cxl"]
    assert tbt_bytes["cxl"] < tbt_bytes["rdma-gather"] < tbt_bytes["rdma-sparse"]
    assert runs["rdma"]["local_bytes_modelled"] > runs["cxl"]["local_bytes_modelled"]
    written = sorted(path.name for path in out.iterdir())
    assert written == ["comparison.png", *(f"ops-{n}.jsonl" for n in sorted(runs)), "runs.jsonl"]
    assert leftovers(home) == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_json(home) -> None:
    argv = ("run", "--backend", "cxl,rdma-sparse", "--json", "--round", "1", *QUICK)
    first, second = emu(*argv), emu(*argv)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    other = emu(*argv, "--seed", "1")
    assert other.returncode == 0
    assert other.stdout != first.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "paced"])
def test_other_clocks_say_whose_time_it_is(home, mode: str) -> None:
    runs = figures(
        "--backend", "cxl", "--time", mode, "--dilation", "100" if mode == "paced" else "1", *QUICK
    )
    clock = runs["cxl"]["clock"]
    assert clock["mode"] == mode
    assert runs["cxl"]["tokens_match"]
    assert runs["cxl"]["kv_bytes_match"]
    if mode == "paced":
        assert clock["dilation"] == 100
        assert clock["paceable_gb_per_s"] > 0


@pytest.mark.slow
def test_a_testbed_that_is_up_is_used_and_stays(home) -> None:
    up = emu(
        "up",
        "--cxl-devices",
        "2",
        "--device-size",
        "16M",
        "--name",
        "bed",
        "--dir",
        str(home.run),
        "--coherence",
        "none",
        "--hosts",
        "2",
    )
    assert up.returncode == 0, up.stderr
    runs = figures("--backend", "cxl,rdma", "--name", "bed", *QUICK)
    assert all(run["tokens_match"] and run["kv_bytes_match"] for run in runs.values())
    status = json.loads(emu("status", "bed", "--json").stdout)
    assert "up" in json.dumps(status)
    assert list((home.run / "bed" / "runs").iterdir()) == []
    too_big = emu(
        "run", "--backend", "cxl", "--name", "bed", "--context", "20000", "--requests", "8"
    )
    assert too_big.returncode == 1
    assert "--device-size" in too_big.stderr
    assert emu("down", "bed").returncode == 0
    assert leftovers(home) == []


def one_line(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert done.returncode == status, done
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 or status == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_bad_input_is_one_line_and_leaves_nothing(home, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n{"timestamp": 1, "inp'
    )
    negative = tmp_path / "negative.jsonl"
    negative.write_text(
        '{"timestamp": 0, "input_length": -6, "output_length": 5, "hash_ids": [0]}\n'
    )
    binary = tmp_path / "binary"
    binary.write_bytes(os.urandom(300))
    plain = tmp_path / "file"
    plain.write_text("keep me")
    one_line(emu("run", "--profile", "sac-sever"), 1, "sac-server")
    one_line(emu("run", "--backend", "cxl,tape"), 1, "tape", "rdma-gather")
    one_line(emu("run", "--model", "large"), 1, "large", "tiny")
    one_line(emu("run", "--trace", str(torn), "--requests", "8"), 1, "torn.jsonl:2")
    one_line(emu("run", "--trace", str(negative)), 1, "negative.jsonl:1")
    one_line(emu("run", "--trace", str(binary)), 1, "binary")
    one_line(emu("run", "--trace", str(tmp_path / "absent")), 1, "absent")
    one_line(emu("run", "--out", str(plain)), 1, "file")
    one_line(emu("run", "--name", "../etc"), 1, "../etc")
    one_line(emu("run", "--name", "nobody"), 1, "nobody")
    one_line(emu("run", "--hot-buffer", "32"), 1, "hot buffer")
    one_line(emu("run", "--context", "20", "--output-tokens", "30"), 1, "--context")
    one_line(emu("run", "--hbm-bytes", "1M"), 1, "--hbm-bytes")
    one_line(emu("run", "--devices", "0"), 2, "--devices")
    one_line(emu("run", "--hbm-bytes", "banana"), 2, "banana")
    assert plain.read_text() == "keep me"
    assert leftovers(home) == []


def test_a_dry_run_prints_the_plan_and_starts_nothing(home) -> None:
    done = emu("run", "--dry-run", "--requests", "3", "--devices", "2")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [request["device"] for request in plan["requests"]] == [0, 1, 0]
    assert leftovers(home) == []


def wait_for(condition, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


LONG = ("--requests", "4", "--context", "1024", "--output-tokens", "400")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode", "oracle", "memory_node"])
def test_kill_9_of_a_worker_is_one_line_and_leaves_nothing(home, role: str) -> None:
    backend = "rdma-sparse" if role == "memory_node" else "cxl"
    command = [sys.executable, "-m", "emu.cli", "run", "--backend", backend, *LONG]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        victim = wait_for(lambda: worker_pids(role, run.pid))[0]
        others = wait_for(lambda: len(worker_pids("", run.pid)) >= 3 and worker_pids("", run.pid))
        time.sleep(3)
        os.kill(victim, signal.SIGKILL)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 1, err
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))
    assert leftovers(home) == []


@pytest.mark.slow
def test_kill_9_of_the_command_ends_its_children_and_down_clears_the_rest(home) -> None:
    assert (
        emu(
            "up",
            "--cxl-devices",
            "1",
            "--device-size",
            "64M",
            "--name",
            "bed",
            "--dir",
            str(home.run),
        ).returncode
        == 0
    )
    for name in (("--name", "bed"), ()):
        command = [
            sys.executable,
            "-m",
            "emu.cli",
            "run",
            "--backend",
            "rdma-sparse,cxl",
            *LONG,
            *name,
        ]
        environment = (
            {**os.environ} if name else {**os.environ, "XDG_STATE_HOME": str(home.state) + "2"}
        )
        run = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        workers = wait_for(
            lambda run=run: len(worker_pids("", run.pid)) >= 4 and worker_pids("", run.pid)
        )
        time.sleep(3)
        run.kill()
        run.wait()
        wait_for(lambda workers=workers: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        if not name:
            status = subprocess.run(
                [sys.executable, "-m", "emu.cli", "status"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert "abandoned" in status.stdout, status
            down = subprocess.run(
                [sys.executable, "-m", "emu.cli", "down", "--all"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert down.returncode == 0, down.stderr
            assert not list(Path(environment["XDG_STATE_HOME"]).rglob("*.json"))
    runs = figures("--backend", "cxl", "--name", "bed", *QUICK)
    assert runs["cxl"]["tokens_match"]
    assert runs["cxl"]["kv_bytes_match"]
    assert emu("down", "bed").returncode == 0
    assert leftovers(home) == []


@pytest.mark.slow
def test_the_small_model_at_its_real_top_k(home) -> None:
    runs = figures(
        "--backend",
        "cxl",
        "--model",
        "small",
        "--context",
        "6000",
        "--requests",
        "1",
        "--output-tokens",
        "8",
    )
    assert runs["cxl"]["tokens_match"]
    assert runs["cxl"]["kv_bytes_match"]
    assert runs["cxl"]["rows_evicted"] > 0
