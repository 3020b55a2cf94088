"""The planner against XM-Sparse's published numbers, and its own arithmetic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from emu.capacity.plan import PARAMETERS, Compute, Demand, Machine, plan
from emu.capacity.sweep import distribution, gains, parse_external, parse_sweep, read_batches, sweep
from emu.cli.main import cli
from emu.errors import UserError
from emu.sim.models import model_shape

if TYPE_CHECKING:
    from pathlib import Path

K = 1024


def planned(*arguments: str) -> dict:
    run = CliRunner().invoke(cli, ["plan", "--json", *arguments], catch_exceptions=False)
    assert run.exit_code == 0
    return json.loads(run.stdout)


XM = (
    "--model",
    "glm-5.3",
    "--hbm",
    "60GiB",
    "--gpus",
    "4",
    "--miss",
    "0.2",
    "--hot-buffer",
    "4096",
    "--top-k",
    "2048",
)


@pytest.mark.parametrize(
    ("context", "capacity", "batch", "bound_by"),
    [
        ("16K", "1T", 241, "hbm"),
        ("128K", "1T", 36, "capacity"),
        ("128000", "1TB", 36, "capacity"),
        ("128K", "24T", 109, "hbm"),
    ],
)
def test_batches_as_published(context: str, capacity: str, batch: int, bound_by: str) -> None:
    found = planned(*XM, "--context", context, "--capacity", capacity)
    assert abs(found["batch_max"] - batch) <= 1
    assert found["bound_by"] == bound_by


def test_times_and_ratios_as_published_with_one_parameter_set() -> None:
    used = planned(*XM, "--context", "16K", "--bandwidth", "64")["capacity_used_bytes"]
    assert used == pytest.approx(0.85e12, rel=0.02)
    measured = {
        b: planned(*XM, "--context", "16K", "--batch", "192", "--bandwidth", b)["tbt_ms"]
        for b in ("64", "900")
    }
    assert measured["64"] == pytest.approx(167.48, rel=0.05)
    assert measured["900"] == pytest.approx(84.99, rel=0.05)
    for context, ratio in (("16K", 1.80), ("128K", 1.39)):
        rates = [
            planned(*XM, "--context", context, "--capacity", "24T", "--bandwidth", b)[
                "tokens_per_s_per_gpu"
            ]
            for b in ("900", "64")
        ]
        assert rates[0] / rates[1] == pytest.approx(ratio, rel=0.05)


def test_fitted_parameters_say_so() -> None:
    for parameter in PARAMETERS.values():
        assert parameter.low <= parameter.value <= parameter.high
        assert "XM-Sparse" in parameter.fitted_to


def machine(**changes: float) -> Machine:
    sizes = {"gpus": 4, "hbm_bytes": 60 * 2**30, "capacity_bytes": 1e12, "bandwidth_gb_per_s": 64.0}
    return Machine(**{**sizes, **changes})


DEMAND = Demand(model_shape("glm-5.3"), 16 * K)


def test_a_node_s_bandwidth_limits_each_gpu() -> None:
    alone, shared = (
        machine(bandwidth_gb_per_s=2000),
        machine(bandwidth_gb_per_s=2000, node_gb_per_s=4000),
    )
    assert plan(shared, DEMAND).bandwidth_gb_per_s == 1000
    assert plan(shared, DEMAND).tbt_ms > plan(alone, DEMAND).tbt_ms
    assert plan(shared, DEMAND, batch=1).read_ms == pytest.approx(
        2 * plan(alone, DEMAND, batch=1).read_ms
    )


def test_small_batches_gain_little() -> None:
    slow, fast = machine(), machine(bandwidth_gb_per_s=900)
    gain = {
        b: plan(slow, DEMAND, batch=b).tbt_ms / plan(fast, DEMAND, batch=b).tbt_ms for b in (1, 192)
    }
    assert gain[1] < 1.02
    assert gain[192] > 1.7
    mine = [
        distribution(m, DEMAND, Compute(), [(1, 0.5), (2, 0.5)])["tokens_per_s_per_gpu"]
        for m in (fast, slow)
    ]
    assert mine[0] / mine[1] < 1.02


def test_what_to_buy_first() -> None:
    long = Demand(model_shape("glm-5.3"), 128 * K)
    found = gains(machine(), long, Compute())
    assert max(found, key=lambda name: found[name]) == "capacity"
    cells = sweep(machine(), long, parse_sweep("bandwidth=64,900,capacity=1T,24T"), Compute())
    assert [(c.bandwidth_gb_per_s, c.capacity_bytes / 1e12, c.binds) for c in cells] == [
        (64, 1, "capacity"),
        (900, 1, "capacity"),
        (64, 24, "bandwidth"),
        (900, 24, "hbm"),
    ]


def test_a_map_says_where_nothing_fits() -> None:
    cells = sweep(machine(), DEMAND, {"capacity": [1e9, 1e12]}, Compute())
    assert [c.binds == "nothing fits" for c in cells] == [True, False]


def test_external_memory_is_counted_as_sold() -> None:
    assert parse_external("1T") == parse_external("1TB") == parse_external("1e12") == 1e12
    assert parse_external("1TiB") == 2**40
    for bad in ("", "T", "-1T", "1X", "nan"):
        with pytest.raises(UserError):
            parse_external(bad)


def test_batches_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_text("# mine\n192 0.25\n8, 0.5\n\n16\n")
    assert read_batches(path) == [(192, 0.25), (8, 0.5), (16, 1.0)]
    out = planned("--batches", str(path))["distribution"]
    assert [b["batch"] for b in out["batches"]] == [192, 8, 16]
    for bad in ("banana", "0", "1 -1", "1 2 3", "", "4 0"):
        path.write_text(bad + "\n")
        with pytest.raises(UserError, match=r"b(:1)?:"):
            read_batches(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--context", "16K", "--batch", "1000"), "does not fit"),
        (("--capacity", "1G"), "not one request"),
        (("--hbm", "100M"), "GPU memory"),
        (("--model", "glm-5.1", "--context", "1M"), "beyond"),
        (("--sweep", "speed=1"), "speed"),
        (("--sweep", "bandwidth=0"), "bandwidth"),
        (("--sweep", "64"), "belongs to nothing"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)
