"""`emu run` as users call it: every design exact, the orderings that the model must give, bad input."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from run_command import (
    QUICK,
    argv,
    emu,
    figures,
    is_exact,
    leftovers,
    one_line,
    wait_for,
    worker_pids,
)

if TYPE_CHECKING:
    from conftest import Home

DATA = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation.jsonl"
TABLE = "--model tiny --requests 8 --context 2048 --output-tokens 16"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The real trace where it is there, else one of the same shape."""
    if DATA.exists():
        return DATA
    path = tmp_path / "trace.jsonl"
    assert emu(f"trace generate --requests 8 --out {path}").returncode == 0
    return path


def test_leftovers_are_seen(home: Home) -> None:
    (home.run / "file").touch()
    command = [sys.executable, "-c", "import time; time.sleep(60)", "emu.sac.worker", "decode"]
    with subprocess.Popen(command) as child:
        try:
            wait_for(lambda: worker_pids(home, "decode"))
            assert leftovers(home) == [f"{home.run}/file", f"pid {child.pid}"]
            assert worker_pids(home, "oracle") == []
        finally:
            child.kill()


@pytest.mark.slow
def test_every_design_is_exact_and_takes_the_sparse_path(
    home: Home, trace: Path, tmp_path: Path
) -> None:
    names = ["dram", "cxl", "rdma", "rdma-sparse", "rdma-gather", "hbm"]
    out = tmp_path / "out"
    runs = figures(home, f"--backend {','.join(names)} --trace {trace} {TABLE} --out {out}")
    assert list(runs) == names
    for name, run in runs.items():
        assert is_exact(run), name
        assert run["clock"] == {"mode": "virtual", "profile": "sac-server", "dilation": None}
        assert run["output_tokens"] == 8 * 16
        assert 0 < run["kv_touched_fraction"] < 1
        if name != "hbm":
            assert run["rows_missed"] > 0
            assert run["rows_evicted"] > 0
            assert 0 < run["hot_hit_rate"] < 1
            assert 0 < run["bytes_before_first_token"] < run["bytes_fetched"]
    ttft = {name: run["ttft_ms"]["p50"] for name, run in runs.items()}
    ttft_bytes = {name: run["ttft_transfer_ms"]["p50"] for name, run in runs.items()}
    tbt_bytes = {name: run["tbt_transfer_ms"]["p50"] for name, run in runs.items()}
    assert ttft["dram"] <= ttft["cxl"] < ttft["rdma"]
    assert ttft_bytes["rdma"] >= 3 * ttft_bytes["cxl"]
    assert tbt_bytes["rdma-sparse"] >= 3 * tbt_bytes["cxl"]
    assert tbt_bytes["cxl"] < tbt_bytes["rdma-gather"] < tbt_bytes["rdma-sparse"]
    assert runs["rdma"]["local_bytes_modelled"] > runs["cxl"]["local_bytes_modelled"]
    written = sorted(path.name for path in out.iterdir())
    logs = [f"ops-{n}.jsonl" for n in names]
    selections = [f"selections-{n}.npz" for n in range(8)]
    assert written == sorted(["comparison.png", "runs.jsonl", *logs, *selections])
    assert leftovers(home) == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_json(home: Home) -> None:
    command = f"run --json --round 1 --dir {home.run} {QUICK}"
    first, second = emu(command), emu(command)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    other = figures(home, f"--round 1 --backend cxl --seed 1 {QUICK}")["cxl"]
    assert other not in json.loads(first.stdout)["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--time off", "--time paced --dilation 100"])
def test_other_clocks_say_whose_time_it_is(home: Home, options: str) -> None:
    run = figures(home, f"--backend cxl {options} {QUICK}")["cxl"]
    clock = run["clock"]
    assert is_exact(run)
    assert clock["mode"] == options.split()[1]
    if clock["mode"] == "paced":
        assert (clock["profile"], clock["dilation"]) == ("sac-server", 100)
        assert clock["paceable_gb_per_s"] > 0
        assert clock["dilation_to_hold"] > 1
    else:
        assert (clock["profile"], clock["dilation"]) == (None, None)


@pytest.mark.slow
def test_a_testbed_that_is_up_is_used_and_stays(home: Home) -> None:
    sizes = "--cxl-devices 2 --device-size 16M --hosts 2 --coherence none"
    assert emu(f"up {sizes} --name bed --dir {home.run}").returncode == 0
    runs = figures(home, f"--backend cxl,rdma --name bed {QUICK}")
    assert all(is_exact(run) for run in runs.values())
    (bed,) = json.loads(emu("status bed --json").stdout)["testbeds"]
    assert bed["state"] == "up"
    assert list((home.run / "bed" / "runs").iterdir()) == []
    too_big = emu("run --backend cxl --name bed --context 20000 --requests 8")
    one_line(too_big, 1, "--device-size")
    one_line(emu(f"run --name bed --dir {home.run}"), 1, "--dir")
    assert emu("down bed").returncode == 0
    assert leftovers(home) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--model small --context 6000 --requests 1 --output-tokens 6", f"--kv-dtype fp8 {QUICK}"],
)
def test_the_other_rows_and_the_real_top_k_are_exact(home: Home, options: str) -> None:
    run = figures(home, f"--backend cxl {options}")["cxl"]
    assert is_exact(run)
    assert run["rows_missed"] > 0


@pytest.mark.slow
def test_out_holds_the_results_of_one_run_and_what_was_not_ours(home: Home, tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures(home, f"--backend cxl,dram --out {out} {QUICK}")
    (out / "notes.txt").write_text("mine")
    (out / "ops-old.jsonl").write_text("mine too")
    (out / "selections-99.npz").write_text("of a longer run")
    (out / "selections-mine.npz").write_text("mine")
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_text("not here")
    (out / "ops-rdma.jsonl").symlink_to(elsewhere)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    one_line(emu(f"run --backend hbm --hbm-bytes 1M --out {out}"), 1, "--hbm-bytes")
    assert emu(f"run --backend hbm --dry-run --out {out}").returncode == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    figures(home, f"--backend hbm --out {out} {QUICK}")
    left = {path.name: path.read_text(errors="replace") for path in out.iterdir()}
    numbered = {name for name in left if re.fullmatch(r"selections-\d+\.npz", name)}
    assert "selections-0.npz" in numbered
    assert "selections-99.npz" not in numbered
    assert sorted(left.keys() - numbered) == [
        "comparison.png",
        "notes.txt",
        "ops-hbm.jsonl",
        "ops-old.jsonl",
        "runs.jsonl",
        "selections-mine.npz",
    ]
    assert (left["notes.txt"], left["ops-old.jsonl"]) == ("mine", "mine too")
    assert [json.loads(line)["backend"] for line in left["runs.jsonl"].splitlines()] == ["hbm"]
    assert elsewhere.read_text() == "not here"


def test_bad_input_is_one_line_and_leaves_nothing(home: Home, tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    (tmp_path / "torn").write_text(good + '{"timestamp": 1, "inp')
    (tmp_path / "negative").write_text(good.replace("600", "-6"))
    (tmp_path / "binary").write_bytes(os.urandom(300))
    plain = tmp_path / "file"
    plain.write_text("keep me")
    one_line(emu("run --profile sac-sever"), 1, "sac-server")
    one_line(emu("run --backend cxl,tape"), 1, "tape", "rdma-gather")
    one_line(emu("run --model large"), 1, "large", "tiny")
    one_line(emu(f"run --trace {tmp_path}/torn"), 1, "torn:2")
    one_line(emu(f"run --trace {tmp_path}/negative"), 1, "negative:1")
    one_line(emu(f"run --trace {tmp_path}/binary"), 1, "binary")
    one_line(emu(f"run --trace {tmp_path}/absent"), 1, "absent")
    one_line(emu(f"run --out {plain}"), 1, "is a file")
    one_line(emu(f"run --out {plain}/below"), 1, "is a file")
    one_line(emu("run --name ../etc"), 1, "../etc")
    one_line(emu("run --name nobody"), 1, "nobody")
    one_line(emu("run --hot-buffer 32"), 1, "hot buffer")
    one_line(emu("run --context 20 --output-tokens 30"), 1, "--context")
    one_line(emu("run --hbm-bytes 1M"), 1, "--hbm-bytes")
    one_line(emu("run --model small --requests 1000 --context 131072"), 1, "needs", "are free")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    one_line(emu(f"run --out {tmp_path}/loop"), 1, "leads nowhere")
    (tmp_path / "out" / "runs.jsonl").mkdir(parents=True)
    one_line(emu(f"run --out {tmp_path}/out"), 1, "runs.jsonl is a directory")
    (tmp_path / "logs" / "ops-cxl.jsonl").mkdir(parents=True)
    one_line(emu(f"run --out {tmp_path}/logs"), 1, "ops-cxl.jsonl is a directory")
    one_line(emu("run --profile /dev/zero"), 1, "/dev/zero")
    one_line(emu("up -f /dev/zero"), 1, "not a regular file")
    one_line(emu("run --seed 18446744073709551616"), 2, "--seed")
    one_line(emu("run --devices 0"), 2, "--devices")
    one_line(emu("run --hbm-bytes banana"), 2, "banana")
    assert plain.read_text() == "keep me"
    assert leftovers(home) == []


def test_a_full_or_closed_stdout_is_no_traceback(home: Home) -> None:
    for redirection, status in (("> /dev/full", 1), (">&-", 0)):
        line = f"{shlex.join(argv('run --dry-run --requests 1'))} {redirection}"
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == status, done
        assert "Traceback" not in done.stderr
    assert leftovers(home) == []


def test_outputs_are_as_long_as_the_trace_says_unless_told_otherwise(
    home: Home, tmp_path: Path
) -> None:
    line = '{"arrival_ms": 0, "input_tokens": %d, "output_tokens": %d, "prefix_ids": []}\n'
    trace = tmp_path / "trace.jsonl"
    lengths = ((3000, 100), (50, 7), (40, 9000), (5000, 2047))
    trace.write_text("".join(line % pair for pair in lengths))

    def planned(options: str) -> list[tuple[int, int]]:
        done = emu(f"run --dry-run --json {options}")
        assert done.returncode == 0, done.stderr
        requests = json.loads(done.stdout)["requests"]
        return [(r["input_tokens"], r["output_tokens"]) for r in requests]

    assert planned(f"--trace {trace}") == [(1948, 100), (50, 7), (2, 2046), (2, 2046)]
    given = f"--trace {trace} --output-tokens 16"
    assert planned(given) == [(2032, 16), (50, 16), (40, 16), (2032, 16)]
    assert {output for _, output in planned("--requests 3")} == {16}
    assert planned(f"--trace {trace} --context 300 --requests 1") == [(200, 100)]
    trace.write_text(line % (1, 3))
    one_line(emu(f"run --dry-run --trace {trace}"), 1, "nothing to cache")


def test_a_dry_run_prints_the_plan_and_starts_nothing(home: Home) -> None:
    assert emu("run --dry-run --requests 3").stdout.startswith("cxl, rdma, ")
    done = emu("run --dry-run --json --requests 3 --devices 2")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["testbed"] is None
    assert [request["device"] for request in plan["requests"]] == [0, 1, 0]
    assert leftovers(home) == []
