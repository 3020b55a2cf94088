"""`emu reproduce`: what must be met, that misses have reasons, and that the report stands alone."""

from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from emu.cli.main import cli
from emu.errors import UserError
from emu.study.candidates import CANDIDATES
from emu.study.catalogue import IDS, SAC, parameters
from emu.study.result import FITTED, ORIGINS, PREDICTED, SELECTED, Row
from emu.study.sac import CHEAP_LAYERS, PARAMETERS, Point, SacModel
from emu.study.sac_reads import fig5
from emu.study.sac_scaling import fig14
from emu.study.sensitivity import Sensitivity, sensitivity
from emu.study.sparse_read import ENTRIES
from emu.study.xm_sparse import xm_plan

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ("sac-fig5", "beluga-sparse", "xm-fig2", "xm-fig3", "xm-fig5", "xm-fig6")


def reproduce(*arguments: str) -> str:
    run = CliRunner().invoke(cli, ["reproduce", *arguments], catch_exceptions=False)
    assert run.exit_code == 0
    return run.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("report")
    return json.loads(reproduce("all", "--json", "--out", str(out))), out


def rows_of(result: dict, study: str) -> dict[str, dict]:
    return {
        row["quantity"]: row for s in result["studies"] if s["id"] == study for row in s["rows"]
    }


@pytest.mark.slow
def test_at_least_five_of_sac_s_seven_ratios_are_met_and_the_rest_have_reasons(whole) -> None:
    result, _ = whole
    five, ten, eleven = (rows_of(result, f"sac-fig{n}") for n in (5, 10, 11))
    seven = {
        "CXL over DRAM": [r for q, r in five.items() if q.startswith("CXL over DRAM")],
        "RDMA over DRAM": [
            r for q, r in five.items() if re.match(r"RDMA over DRAM, (least|most)$", q)
        ],
        **{
            name: [next(r for q, r in ten.items() if q.startswith(name))]
            for name in (
                "throughput, SAC over RDMA",
                "TTFT",
                "TBT",
                "throughput, SAC over local DRAM",
            )
        },
        "at 128K": [next(r for q, r in eleven.items() if "at 128K" in q)],
    }
    assert all(seven.values())
    met = {name: all(row["met"] for row in rows) for name, rows in seven.items()}
    assert sum(met.values()) >= 5, met
    for name, rows in seven.items():
        assert met[name] or any(row["reason"] for row in rows)


@pytest.mark.slow
def test_every_miss_has_a_reason_and_every_fit_is_marked(whole) -> None:
    result, _ = whole
    for study in result["studies"]:
        for row in study["rows"]:
            if row["met"] is False:
                assert row["reason"], row["quantity"]
            if row["low"] is not None:
                assert row["low"] <= row["model"] <= row["high"], row["quantity"]
    fitted = {
        row["quantity"] for s in result["studies"] for row in s["rows"] if row["origin"] == FITTED
    }
    assert any("TBT" in q for q in fitted)
    assert rows_of(result, "sac-fig4")["KV touched at 128K, 1K output"]["model"] == pytest.approx(
        21, abs=2
    )


@pytest.mark.slow
def test_what_the_model_cannot_match_is_shown_as_missed(whole) -> None:
    missed = {
        (s["id"], row["quantity"])
        for s in whole[0]["studies"]
        for row in s["rows"]
        if row["met"] is False
    }
    assert missed == {
        ("sac-fig5", "largest ratio of RDMA over DRAM"),
        ("sac-fig10", "throughput, SAC over RDMA, mean over 16K-128K"),
        ("sac-fig10", "TTFT, RDMA over SAC, mean"),
        ("sac-fig13", "interleaving helps at 128K"),
        ("sac-fig13", "it helps most at 128K (1 is yes)"),
        ("xm-fig6", "throughput, X-Mem over PCIe at batch 192"),
    }


@pytest.mark.slow
def test_a_predicted_value_has_an_interval_or_no_parameter_moves_it(whole) -> None:
    without = {
        row["quantity"]
        for s in whole[0]["studies"]
        for row in s["rows"]
        if row["origin"] == PREDICTED and row["low"] is None
    }
    assert without == {
        "it helps most at 128K (1 is yes)",
        "HBM only, 128 in flight over 64",
        "batch per GPU at 128K, 1 TB",
        "external memory used at 16K",
    }


@pytest.mark.slow
def test_the_settings_that_were_tried_are_listed_with_what_they_give(whole) -> None:
    result, out = whole
    settings = {s.pop("setting"): s for s in [dict(s) for s in result["settings"]]}
    used = settings.pop("as used")
    assert len(settings) == len(CANDIDATES) - 1
    for name, found in settings.items():
        # bandwidth beyond the adapters' changes nothing
        assert found != used or "256" in name, name
    page = (out / "report.html").read_text()
    assert all(html.escape(name) in page for name in settings)
    ten = rows_of(result, "sac-fig10")
    for quantity, row in ten.items():
        if row["published"] is not None:
            assert row["origin"] != PREDICTED, quantity  # the choice was made knowing these
        if quantity.startswith("throughput, SAC over RDMA"):
            assert used["throughput"] == pytest.approx(row["model"], rel=0.02)
    assert settings["decode goes on during a prefetch"]["tbt"] < 1


@pytest.mark.slow
def test_the_counts_tell_predicted_from_chosen(whole) -> None:
    result, _ = whole
    rows = [row for s in result["studies"] for row in s["rows"] if row["met"] is not None]
    for origin in ORIGINS:
        of_it = [row for row in rows if row["origin"] == origin]
        assert result["compared"][origin] == len(of_it) > 0
        assert result["met"][origin] == sum(row["met"] for row in of_it)


@pytest.mark.slow
def test_hbm_only_is_ahead_with_few_requests_and_behind_with_many(whole) -> None:
    rows = rows_of(whole[0], "sac-fig12")
    ahead, behind = [row for q, row in rows.items() if q.startswith("HBM only over SAC")]
    assert ahead["model"] > 1 > behind["model"]


@pytest.mark.slow
def test_the_report_is_one_page_that_loads_nothing(whole) -> None:
    result, out = whole
    page = (out / "report.html").read_text()
    assert not re.search(r"""(?:src|href)=["']?(?!["']|data:|#)""", page)
    for study in result["studies"]:
        assert f'id="{study["id"]}"' in page
        assert (out / f"{study['id']}.png").read_bytes().startswith(b"\x89PNG")
        assert "| quantity |" in (out / f"{study['id']}.md").read_text()
    assert [s["id"] for s in result["studies"]] == list(IDS)
    assert json.loads((out / "results.json").read_text())["met"] == result["met"]
    assert "Sensitivity" in page


@pytest.mark.slow
def test_a_study_alone_gives_what_it_gives_among_all(whole) -> None:
    alone = json.loads(reproduce("sac-fig14", "xm-fig2", "--json"))["studies"]
    among = {s["id"]: s for s in whole[0]["studies"]}
    assert [s["id"] for s in alone] == ["sac-fig14", "xm-fig2"]
    assert all(study == among[study["id"]] for study in alone)


def test_the_same_bytes_every_time() -> None:
    assert reproduce(*QUICK, "--json") == reproduce(*QUICK, "--json")


def test_sparse_reads_lie_where_published() -> None:
    study = fig5(SacModel(), Sensitivity())
    curves = {c.label: c.y for c in study.curves}
    assert len(curves["CXL over DRAM"]) == len(ENTRIES)
    assert all(1.04 <= ratio <= 1.64 for ratio in curves["CXL over DRAM"])
    assert all(4.0 * 0.85 <= ratio <= 19.7 for ratio in curves["RDMA over DRAM"])
    missed = [row.quantity for row in study.rows if row.met is False]
    assert missed == ["largest ratio of RDMA over DRAM"]
    assert max(curves["RDMA"]) > 1000  # "reaching milliseconds"


def test_beluga_s_sparse_reads_from_microbenchmarks_alone() -> None:
    result = json.loads(reproduce("beluga-sparse", "--json"))
    rows = rows_of(result, "beluga-sparse").values()
    assert len(rows) == 4
    for row in rows:
        assert abs(row["error"]) <= 0.25
        assert row["origin"] == SELECTED


def test_parameters_have_a_range_and_a_source() -> None:
    for parameter in PARAMETERS:
        assert parameter.low <= parameter.value <= parameter.high
        assert parameter.basis in ("microbenchmark", "assumption", "fitted")
        assert parameter.source
    assert set(parameters()) == {"sac", "xm-sparse", "beluga"}


def test_the_parameters_are_those_of_the_profile() -> None:
    from emu.timing.profile_file import load_system

    profile = load_system("sac-server")
    for parameter in PARAMETERS:
        section, _, name = parameter.target.rpartition(".")
        if section.startswith("link."):
            assert (
                getattr(profile.links[section.removeprefix("link.")].model, name).value
                == parameter.value
            )
        elif section == "compute":
            assert getattr(profile.compute, name).value == parameter.value


def test_xm_sparse_s_printed_values() -> None:
    rows = {}
    for s in ("xm-fig2", "xm-fig5", "xm-fig6"):
        rows |= rows_of(json.loads(reproduce(s, "--json")), s)
    published = {
        "batch per GPU at 16K": (241, 1 / 241),
        "batch per GPU at 128K, 1 TB": (36, 1 / 36),
        "batch per GPU at 128K, 24 TB": (109, 1 / 109),
        "external memory used at 16K": (0.85, 0.02),
        "throughput, 900 over 64 GB/s at 16K": (1.80, 0.05),
        "throughput, 900 over 64 GB/s at 128K": (1.39, 0.05),
        "TPOT at batch 192, host DRAM over PCIe": (167.48, 0.05),
        "TPOT at batch 192, X-Mem": (84.99, 0.05),
    }
    for quantity, (value, tolerance) in published.items():
        assert rows[quantity]["model"] == pytest.approx(value, rel=tolerance), quantity
    gain = rows["throughput, X-Mem over PCIe at batch 192"]
    assert gain["met"] is False
    assert gain["reason"]


def test_bandwidth_gains_nothing_where_capacity_binds() -> None:
    few, many = xm_plan("NVLink-C2C", 128 * 1024), xm_plan("CXL", 128 * 1024)
    assert few.batch_max < many.batch_max
    assert few.bound_by == "capacity"


def test_the_cheap_model_of_few_layers_has_the_same_ratios() -> None:
    gains = []
    for layers in (CHEAP_LAYERS, 2 * CHEAP_LAYERS):
        with SacModel(layers=layers) as model:
            points = [Point(design, 128 << 10, 16) for design in ("cxl", "dram")]
            cxl, dram = (run["throughput_tok_s"] for run in model.run(points))
        gains.append(cxl / dram)
    assert gains[0] == pytest.approx(gains[1], rel=0.02)


def test_a_larger_buffer_misses_less_and_gives_more() -> None:
    with SacModel(layers=CHEAP_LAYERS) as model:
        study = fig14(model, Sensitivity())
    throughput, misses = (c.y for c in study.curves)
    assert list(throughput) == sorted(throughput)
    assert list(misses) == sorted(misses, reverse=True)


def test_a_seed_decides() -> None:
    runs = []
    for seed in (0, 0, 1):
        with SacModel(layers=2, seed=seed) as model:
            runs.append(model.run([Point("cxl", 16 << 10, 8)]))
    assert runs[0] == runs[1] != runs[2]


def test_what_the_sensitivity_takes_over_is_what_it_would_compute() -> None:
    from emu.study.sensitivity import _UNTOUCHED

    with SacModel(layers=2) as base:
        for parameter in PARAMETERS:
            for design in _UNTOUCHED.get(parameter.target.rpartition(".")[0], ()):
                with SacModel({parameter.target: parameter.low}, layers=2) as model:
                    point = [Point(design, 16 << 10, 8)]
                    assert model.run(point)[0]["tbt_ms"] == base.run(point)[0]["tbt_ms"]


def test_a_parameter_moves_what_it_should() -> None:
    changes = {(name, value): change for name, value, change in sensitivity(serving=False).table}
    assert changes["GPU reading CXL", 23]["cxl_most"] > 0.05
    assert changes["GPU reading CXL", 23]["rdma_most"] == 0
    assert changes["NIC", 10.2]["cxl_most"] == 0


def test_a_row_s_verdict() -> None:
    assert Row("q", 1.1, "x", 1.0, 0.15).met is True
    assert Row("q", 1.2, "x", 1.0, 0.15).met is False
    assert Row("q", 1.2, "x").met is None
    assert Row("q", 5.0, "x", limits=(1.0, 4.0)).met is False
    assert Row("q", 4.5, "x", limits=(1.0, 4.0)).met is True
    assert Row("q", 4.5, "x", tolerance=0.0, limits=(1.0, 4.0)).met is False


def test_names() -> None:
    assert reproduce("--list").split() == list(IDS)
    assert reproduce("sac-fig5", "--dry-run").split() == ["sac-fig5"]
    assert len(SAC) == 8
    with pytest.raises(UserError, match="sac-fig5"):
        CliRunner().invoke(cli, ["reproduce", "sac-fig55"], catch_exceptions=False)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="directory"):
        CliRunner().invoke(
            cli, ["reproduce", "xm-fig2", "--out", str(tmp_path / "f")], catch_exceptions=False
        )
