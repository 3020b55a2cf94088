"""The serving simulator as users call it; test_sim_cross_check.py holds it against `emu run`'s engine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner

from emu.cli.main import cli
from emu.errors import UserError
from emu.sac.designs import DESIGNS
from emu.sac.plan import RunSpec, place
from emu.sim.columns import COLUMNS, request_columns
from emu.sim.command import run_design
from emu.sim.models import MODELS, ModelShape, model_shape
from emu.sim.simulate import SimSpec, simulate
from emu.sim.workload import Workload
from emu.timing.system import System
from emu.trace.request import Request

if TYPE_CHECKING:
    from pathlib import Path

K = 1024
LAYERS = 8


def shape(**changes: object) -> ModelShape:
    few = tuple(range(LAYERS))
    return replace(
        model_shape("deepseek-v3.2"),
        **{"num_layers": LAYERS, "kv_layers": few, "index_layers": few, **changes},
    )


def spec(**changes: object) -> SimSpec:
    run = {"top_k": 2048, "hot_buffer": 4096, "gpus": 4, "devices": 2, "concurrency": 8}
    sim = {"servers", "host_bytes", "index_prefetch", "prefetch_stalls", "shape"}
    ours = {k: v for k, v in changes.items() if k in sim}
    return SimSpec(
        RunSpec(**{**run, **{k: v for k, v in changes.items() if k not in sim}}),
        **{"shape": shape(), **ours},
    )


def figures(design: str, setting: SimSpec, prompt: int = 32 * K, output: int = 40) -> dict:
    work = Workload.burst(2 * setting.run.concurrency, prompt, output)
    return run_design(setting, DESIGNS[design], work)


def sim(*arguments: str) -> str:
    run = CliRunner().invoke(cli, ["sim", "--json", *arguments], catch_exceptions=False)
    assert run.exit_code == 0
    return run.stdout


QUICK = ("--gpus", "2", "--concurrency", "4", "--context", "8K", "--output-tokens", "8")


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert sim(*QUICK) == sim(*QUICK)
    assert sim(*QUICK) != sim(*QUICK, "--seed", "1")


def test_what_it_reports() -> None:
    runs = {run["backend"]: run for run in json.loads(sim(*QUICK))["runs"]}
    assert set(runs) == set(DESIGNS)
    for run in runs.values():
        assert run["clock"] == {"mode": "virtual", "profile": "sac-server", "dilation": None}
        for name in ("ttft_ms", "tbt_ms"):
            assert run[name]["mean"] > 0
            assert run[name]["p50"] <= run[name]["p99"]
        assert run["throughput_tok_s"] > 0
        assert run["bound_by"]
        assert all(0 < link["utilisation"] <= 1 for link in run["links"].values())
    assert runs["cxl"]["miss_rate"] > 0
    assert runs["hbm"]["rows_missed"] == 0
    assert runs["rdma"]["host_bytes_peak"] > 0
    assert runs["cxl"]["host_bytes_peak"] == 0


@pytest.mark.slow
def test_one_point_of_the_paper_takes_seconds() -> None:
    began = time.process_time()
    out = sim(
        "--backend",
        "cxl",
        "--gpus",
        "8",
        "--context",
        "129K",
        "--output-tokens",
        "1024",
        "--concurrency",
        "64",
    )
    assert json.loads(out)["runs"][0]["output_tokens"] == 64 * 1024
    assert time.process_time() - began < 30  # about 2 s of processor time on an idle machine


def test_designs_order_as_in_the_paper() -> None:
    runs = {name: figures(name, spec()) for name in DESIGNS}
    assert runs["dram"]["ttft_ms"]["mean"] <= runs["cxl"]["ttft_ms"]["mean"]
    assert runs["cxl"]["ttft_ms"]["mean"] * 3 < runs["rdma"]["ttft_ms"]["mean"]
    transfer = {name: run["tbt_transfer_ms"]["mean"] for name, run in runs.items()}
    assert transfer["cxl"] < transfer["rdma-gather"] < transfer["rdma-sparse"]
    assert transfer["rdma-sparse"] > 3 * transfer["cxl"]


def test_hbm_only_is_ahead_until_memory_is_full() -> None:
    small = {"hbm_bytes": 4 << 30, "gpus": 1}
    few = {name: figures(name, spec(concurrency=2, **small)) for name in ("hbm", "cxl")}
    many = {name: figures(name, spec(concurrency=32, **small)) for name in ("hbm", "cxl")}
    assert few["hbm"]["throughput_tok_s"] > few["cxl"]["throughput_tok_s"]
    assert many["hbm"]["throughput_tok_s"] < many["cxl"]["throughput_tok_s"]
    assert many["hbm"]["bound_by"] == "GPU memory"
    assert many["hbm"]["gpu_bytes_peak"] <= 4 << 30


def test_host_memory_admits_requests_one_after_the_other() -> None:
    free = figures("rdma", spec())
    need = free["host_bytes_peak"]
    tight = figures("rdma", spec(host_bytes=need // 3))
    assert tight["host_bytes_peak"] <= need // 3
    assert tight["throughput_tok_s"] < free["throughput_tok_s"]
    assert tight["output_tokens"] == free["output_tokens"]
    with pytest.raises(UserError, match="host memory"):
        figures("rdma", spec(host_bytes=1 << 20))


def test_a_request_that_no_gpu_holds_is_refused() -> None:
    with pytest.raises(UserError, match="GPU memory with hbm"):
        figures("hbm", spec(hbm_bytes=1 << 20))


def test_round_1_takes_prefill_and_its_writes() -> None:
    second, first = (figures("cxl", spec(round=r)) for r in (2, 1))
    assert first["ttft_ms"]["mean"] > second["ttft_ms"]["mean"]
    assert first["ttft_transfer_ms"]["mean"] > second["ttft_transfer_ms"]["mean"]


def test_servers_share_the_pool_and_nothing_else() -> None:
    one = figures("cxl", spec())
    four = figures("cxl", spec(gpus=16, servers=4, concurrency=32))
    assert 3 < four["throughput_tok_s"] / one["throughput_tok_s"] <= 4.001
    adapters = [name for name in four["links"] if name.startswith("adapter")]
    assert len(adapters) == 8
    assert four["links"]["switch"]["bytes"] == sum(four["links"][a]["bytes"] for a in adapters)
    crowded = figures("cxl", spec(gpus=16, servers=4, concurrency=32, placement="single"))
    assert crowded["throughput_tok_s"] <= four["throughput_tok_s"]


def test_reading_ahead_for_shared_selections_shortens_steps() -> None:
    shared = shape(index_layers=(0, 4))
    slow = figures("cxl", spec(shape=shared))
    fast = figures("cxl", spec(shape=shared, index_prefetch=True))
    assert fast["rows_missed"] == slow["rows_missed"]
    assert fast["tbt_transfer_ms"]["mean"] < 0.7 * slow["tbt_transfer_ms"]["mean"]
    # fewer layers keep index keys
    assert slow["ttft_ms"]["mean"] < figures("cxl", spec())["ttft_ms"]["mean"]


def test_decode_that_waits_for_prefetch_has_longer_gaps() -> None:
    work = Workload.steady(8, 32 * K, 200)
    goes_on, waits = (
        run_design(spec(prefetch_stalls=stalls), DESIGNS["rdma"], work) for stalls in (False, True)
    )
    assert waits["tbt_ms"]["mean"] > 1.05 * goes_on["tbt_ms"]["mean"]
    same = run_design(spec(prefetch_stalls=True), DESIGNS["cxl"], work)
    same["spec"]["prefetch_stalls"] = False
    assert same == run_design(spec(), DESIGNS["cxl"], work)


def test_a_run_that_stops_early_agrees_with_the_whole_one() -> None:
    work = Workload.steady(8, 16 * K, 50)
    whole = simulate(spec(), DESIGNS["cxl"], work.requests)
    part = simulate(replace(spec(), stop_after=16), DESIGNS["cxl"], work.requests)
    ended = [i for i, t in enumerate(part.token_ns) if t[-1] > 0]
    assert len(ended) >= 16
    for i in ended:
        assert part.token_ns[i].tolist() == whole.token_ns[i].tolist()


@pytest.mark.parametrize(("design", "gpus", "concurrency"), [("cxl", 3, 10), ("hbm", 4, 16)])
def test_a_steady_state_measures_whole_requests(design: str, gpus: int, concurrency: int) -> None:
    """GPUs with fewer requests in flight are ahead of the others: those must not be cut off."""
    work = Workload.steady(concurrency, 16 * K, 60)
    setting = spec(gpus=gpus, concurrency=concurrency, hbm_bytes=1 << 30)
    outcome = simulate(
        replace(setting, stop_after=work.measured[1]), DESIGNS[design], work.requests
    )
    for times in outcome.token_ns[slice(*work.measured)]:
        assert (np.diff(times) > 0).all()


def test_no_link_is_more_than_busy() -> None:
    work = Workload.steady(64, 32 * K, 200)
    setting = replace(spec(gpus=8, concurrency=64), stop_after=work.measured[1])
    outcome = simulate(setting, DESIGNS["rdma"], work.requests)
    end_ns = max(int(times.max()) for times in outcome.token_ns)
    # copies are queued beyond the end
    assert max(busy for busy, _ in outcome.links.values()) > end_ns
    links = run_design(setting, DESIGNS["rdma"], work)["links"]
    assert max(link["utilisation"] for link in links.values()) == 1


def test_a_prefix_is_prefilled_once_in_a_store() -> None:
    ids = [(1, 2, 3), (9, 2), (1, 2, 4), (1, 2, 3)]
    requests = [Request(f"r{i}", 0.0, 512 * len(b) + 1, 4, b) for i, b in enumerate(ids)]
    plans = place(requests, spec().run, "sim")

    def computed(design: str) -> list[int]:
        system = System.load("sac-server", gpus=4, devices=2)
        columns = request_columns(spec(), DESIGNS[design], system, plans)
        return columns[:, COLUMNS.index("publish_rows")].tolist()

    # CXL devices hold requests 0 and 2, 1 and 3; a memory node holds all.
    assert computed("cxl") == [1536, 1024, 512, 1536]
    assert computed("rdma") == [1536, 1024, 512, 0]


def test_a_trace_with_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run = CliRunner().invoke(cli, ["trace", "generate", "--requests", "12", "--out", str(path)])
    assert run.exit_code == 0
    out = sim(
        "--backend",
        "cxl,rdma",
        "--trace",
        str(path),
        "--arrivals",
        "trace",
        "--context",
        "32K",
        "--output-tokens",
        "8",
        "--gpus",
        "2",
        "--concurrency",
        "12",
    )
    for entry in json.loads(out)["runs"]:
        assert entry["requests"] == 12
        assert entry["output_tokens"] == 96
    first = sim(
        "--backend",
        "cxl",
        "--trace",
        str(path),
        "--round",
        "1",
        "--context",
        "32K",
        "--output-tokens",
        "8",
    )
    assert json.loads(first)["runs"][0]["ttft_ms"]["mean"] > 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_runs(name: str) -> None:
    out = sim("--backend", "cxl", "--model", name, "--kv-dtype", "fp8", *QUICK)
    assert json.loads(out)["runs"][0]["throughput_tok_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "glm5"), "no model"),
        (("--context", "1M"), "beyond"),
        (("--context", "1K", "--output-tokens", "1024"), "no prompt"),
        (("--hot-buffer", "100"), "cannot hold"),
        (("--arrivals", "trace"), "no trace"),
        (("--profile", "sac-serve"), "profile"),
        (("--backend", "cxl,tape"), "backend"),
        (("--steady", "--requests", "7"), "its own requests"),
        (("--steady", "--trace", "t.jsonl"), "its own requests"),
        (("--hbm-bytes", "1M", "--backend", "cxl"), "GPU memory"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=words):
        CliRunner().invoke(cli, ["sim", *arguments, "--out", str(out)], catch_exceptions=False)
    assert not out.exists()


def test_a_run_says_its_setting() -> None:
    (run,) = json.loads(
        CliRunner()
        .invoke(
            cli,
            [
                "sim",
                "--json",
                "--backend",
                "cxl",
                "--context",
                "8K",
                "--output-tokens",
                "8",
                "--concurrency",
                "8",
                "--seed",
                "3",
            ],
            catch_exceptions=False,
        )
        .stdout
    )["runs"]
    said = run["spec"]
    assert (said["model"], said["concurrency"], said["seed"], said["policy"]) == (
        "deepseek-v3.2",
        8,
        3,
        "lru",
    )
    assert (said["prompt_tokens_mean"], said["output_tokens_mean"]) == (8184, 8)


def test_waiting_for_memory_is_part_of_ttft() -> None:
    """Little's law: what is in flight is the rate times the time that a request takes, be it served or waiting."""
    work = Workload.steady(32, 32 * K, 100)
    held = run_design(spec(concurrency=32, hbm_bytes=1 << 30), DESIGNS["hbm"], work)
    assert held["bound_by"] == "GPU memory"
    assert held["ttft_queue_ms"]["mean"] > 0.5 * held["ttft_ms"]["mean"]
    per_request_s = (held["ttft_ms"]["mean"] + 99 * held["tbt_ms"]["mean"]) / 1000
    assert held["throughput_tok_s"] / 100 * per_request_s == pytest.approx(32, rel=0.15)
