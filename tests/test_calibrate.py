"""Profiles from what Intel MLC, perftest and `emu bench` print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from emu.calibrate.measured import (
    read_mlc,
    read_perftest_bandwidth,
    read_perftest_latency,
    read_sparse,
)
from emu.cli.main import cli
from emu.errors import UserError
from emu.timing.profile_file import load_media

if TYPE_CHECKING:
    from pathlib import Path

MLC = """Intel(R) Memory Latency Checker - v3.11
Measuring idle latencies for sequential access (in ns)...
		Numa node
Numa node	     0	     1	     2
       0	 113.4	 190.2	 255.1
       1	 189.0	 112.9	     -

Measuring Peak Injection Memory Bandwidths for the system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
Using all the threads from each core if Hyper-threading is enabled
ALL Reads        :	481234.5
Measuring Memory Bandwidths between nodes within system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
		Numa node
Numa node	     0	     1	     2
       0	240123.4	 98765.4	 22456.7
       1	 98700.1	239001.2	 22010.3
"""
LATENCY = """---------------------------------------------------------------------------------------
                    RDMA_Read Latency Test
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 2       1000          1.82           6.01         1.90               1.92             0.10            2.31                    6.01
 64      1000          1.83           6.11         1.91               1.93             0.10            2.35                    6.11
---------------------------------------------------------------------------------------
"""
BANDWIDTH = """ #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 64         1000             2.10               2.05                 4.000000
 65536      1000             92.60              92.50                0.176430
"""
BANDWIDTH_MB = """ #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1000             11100.0            11000.0              0.176000
"""


def saved(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def by_field(found) -> dict[str, tuple[float, float, float]]:
    return {m.field: (m.value, m.low, m.high) for m in found}


def test_mlc(tmp_path: Path) -> None:
    found = by_field(read_mlc(saved(tmp_path / "mlc", MLC), 0, 2))
    assert found == {
        "latency_ns": (255.1, 255.1, 255.1),
        "read_gb_per_s": (22.4567, 22.4567, 22.4567),
    }
    # a pair that was measured only in part
    assert set(by_field(read_mlc(tmp_path / "mlc", 1, 2))) == {"read_gb_per_s"}
    with pytest.raises(UserError, match="node 7"):
        read_mlc(tmp_path / "mlc", 0, 7)
    with pytest.raises(UserError, match="cut short"):
        read_mlc(saved(tmp_path / "torn", MLC.replace(" 190.2	 255.1", "")), 0, 2)


def test_perftest(tmp_path: Path) -> None:
    latency = by_field(read_perftest_latency(saved(tmp_path / "lat", LATENCY)))
    assert latency == {"latency_ns": (1900, 1820, 2310)}
    rate = by_field(read_perftest_bandwidth(saved(tmp_path / "bw", BANDWIDTH)))
    assert rate["read_gb_per_s"] == pytest.approx((11.5625, 11.5625, 11.575))
    assert rate["per_request_ns"] == pytest.approx((250, 250 * 2.05 / 2.10, 250))
    megabytes = by_field(read_perftest_bandwidth(saved(tmp_path / "mb", BANDWIDTH_MB)))
    assert megabytes["read_gb_per_s"][0] == pytest.approx(11000 * 2**20 / 1e9)
    assert "per_request_ns" not in megabytes  # its smallest message is a large one
    for text in ("", LATENCY.splitlines()[2], "#bytes nothing\n1 2\n"):
        with pytest.raises(UserError, match="perftest"):
            read_perftest_latency(saved(tmp_path / "bad", text))


def bench(path: Path, top_k: int, median_ns: float, row_bytes: int = 1152) -> Path:
    case = {"name": "cxl", "median_ns": median_ns}
    return saved(
        path, json.dumps({"top_k": top_k, "row_bytes": row_bytes, "groups": [{"cases": [case]}]})
    )


def test_a_line_through_our_own_measurements(tmp_path: Path) -> None:
    files = [bench(tmp_path / str(k), k, 2000 + 100 * k) for k in (256, 1024, 2048)]
    found = by_field(read_sparse(files, "cxl"))
    assert found["read_gb_per_s"] == pytest.approx((11.52, 11.52, 11.52))
    assert found["setup_ns"] == pytest.approx((2000, 2000, 2000))
    files.append(bench(tmp_path / "more", 2048, 2000 + 110 * 2048))
    low, value, high = (by_field(read_sparse(files, "cxl"))["read_gb_per_s"][i] for i in (1, 0, 2))
    assert low < value < high
    with pytest.raises(UserError, match="two measurements"):
        read_sparse(files[:1], "cxl")
    with pytest.raises(UserError, match="no case"):
        read_sparse(files, "tape")
    with pytest.raises(UserError, match="less time"):
        read_sparse([files[0], bench(tmp_path / "odd", 4096, 1.0)], "cxl")


def calibrate(*arguments: str):
    return CliRunner().invoke(cli, ["calibrate", *arguments], catch_exceptions=False)


def test_a_profile_that_emu_loads_with_its_interval_and_the_base_s_sources(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    lat, bw = saved(tmp_path / "lat", LATENCY), saved(tmp_path / "bw", BANDWIDTH)
    run = calibrate(
        "--ib-read-lat",
        str(lat),
        "--ib-read-bw",
        str(bw),
        "--base",
        "rdma-100g",
        "--source",
        "our lab",
        "--date",
        "2026-12",
        "--out",
        str(out),
    )
    assert run.exit_code == 0
    model, base = load_media(str(out)).model, load_media("rdma-100g").model
    assert model.latency_ns.value == 1900
    assert model.latency_ns.source == "our lab"
    assert "1820 .. 2310" in model.latency_ns.note
    assert model.per_request_ns.value == 250
    assert "writes were not measured" in model.write_gb_per_s.note
    assert model.parallelism == base.parallelism


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    mlc, out = saved(tmp_path / "mlc", MLC), tmp_path / "m.toml"
    run = calibrate("--mlc", str(mlc), "--node", "2", "--out", str(out), "--dry-run")
    assert "latency_ns" in run.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no measurement"),
        (("--mlc", "nowhere"), "cannot be read"),
        (("--base", "tape"), "tape"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    mlc = saved(tmp_path / "mlc", MLC)
    extra = ("--mlc", str(mlc)) if "--base" in arguments else ()
    with pytest.raises(UserError, match=words):
        calibrate(*arguments, *extra, "--out", str(tmp_path / "x.toml"))
    assert not (tmp_path / "x.toml").exists()
