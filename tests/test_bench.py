"""`emu bench`: turns are taken, bytes are checked, and what cannot be timed is said."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from emu.bench.data_path import MappedPool, Workload, flush_group, gather_group, scatter_group
from emu.bench.measure import Case, Group, Trial, measure, report
from emu.cli.bench import command
from emu.errors import EmuError, HostError, UserError
from emu.probes import probe

SMALL = ["--rounds", "2", "--top-k", "64", "--context", "1000", "--kv-dtype", "fp8"]


def recorded(name: str, log: list[str], *, good: bool = True) -> Case:
    return Case(name, lambda: Trial(lambda: log.append(name), lambda: good))


def test_cases_take_turns_and_every_round_begins_with_another():
    log: list[str] = []
    group = Group("g", "row", 1, 1, (recorded("a", log), recorded("b", log)))
    figures = measure(group, 2)
    assert "".join(log) in {"babaabba", "baabba"}
    assert [f.name for f in figures] == ["a", "b"]
    assert figures[0].ratio_p15 == figures[0].ratio_p50 == figures[0].ratio_p85 == 1


def test_wrong_bytes_end_the_benchmark():
    group = Group("g", "row", 1, 1, (recorded("a", []), recorded("b", [], good=False)))
    with pytest.raises(EmuError, match="g: b moved wrong bytes"):
        measure(group, 1)


def test_a_group_without_cases_still_names_what_was_skipped():
    (entry,) = report([Group("g", "row", 1, 1, (), (("rdma", "no node"),))], 1)
    assert entry["cases"] == []
    assert entry["skipped"] == [{"name": "rdma", "reason": "no node"}]


@pytest.mark.parametrize(
    "make", [gather_group, scatter_group, lambda pool: flush_group(pool, 11)], ids="gsf"
)
def test_every_case_moves_the_right_bytes(make):
    for case in make(MappedPool(Workload(656, 32, 500, 3))).cases:
        trial = case.prepare()
        trial.run()
        assert trial.verify()


@pytest.mark.parametrize(
    ("make", "moving"),
    [(gather_group, 4), (scatter_group, 3), (lambda pool: flush_group(pool, 11), 2)],
    ids="gsf",
)
def test_a_case_that_moved_nothing_would_be_noticed(make, moving):
    cases = make(MappedPool(Workload(656, 32, 500, 3))).cases
    assert [case.prepare().verify() for case in cases[:moving]] == [False] * moving


def test_json_has_a_version_a_clock_and_every_group():
    done = CliRunner().invoke(command, [*SMALL, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert result["schema_version"] == 1
    assert result["clock"] == "host"
    names = [group["group"] for group in result["groups"]]
    assert names == [
        "gather",
        "scatter",
        "flush of 11 lines",
        "flush of 16384 lines",
        "store gather",
    ]
    for group in result["groups"][:-1]:
        assert group["cases"][0]["name"] == group["base"]
        for case in group["cases"]:
            assert case["median_ns"] > 0
            assert case["ratio"]["p15"] <= case["ratio"]["p50"] <= case["ratio"]["p85"]
    stores = result["groups"][-1]
    timed = {case["name"].split(",")[0] for case in stores["cases"]}
    assert timed | {s["name"] for s in stores["skipped"]} == {"dram", "cxl", "rdma"}
    assert all(s["reason"] for s in stores["skipped"])


def test_the_table_says_that_it_is_host_time():
    done = CliRunner().invoke(command, SMALL, catch_exceptions=False)
    assert done.exit_code == 0
    assert "Host time" in done.stdout
    assert "emu gather" in done.stdout


def test_more_rows_than_tokens_or_than_memory_are_refused():
    with pytest.raises(UserError, match="--context 10"):
        CliRunner().invoke(command, ["--top-k", "11", "--context", "10"], catch_exceptions=False)
    with pytest.raises(HostError, match=r"of memory are free \(choose a shorter --context\)"):
        CliRunner().invoke(command, ["--context", str(1 << 40)], catch_exceptions=False)
    assert CliRunner().invoke(command, ["--rounds", "0"]).exit_code == 2


def test_the_index_is_looked_up_right_and_faster_than_redis_where_there_is_one():
    """The goal is 20 times; a noisy machine gets a wide margin."""
    words = ["index", "--vs", "redis", "--records", "20000", "--rounds", "5", "--json"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    assert [one["hosts"] for one in result["by_hosts"]] == [1, 2, 4, 8]
    assert {"coherent", "incoherent"} <= set(result["lookup"])
    if not probe("redis").ok:
        assert result["speedup_vs_redis"] is None
        assert "redis-server" in result["redis_skipped"]
        pytest.skip(result["redis_skipped"])
    assert result["redis_skipped"] == ""
    assert result["speedup_vs_redis"] > 5
    assert result["speedup_vs_redis"] == result["lookup"]["redis"]["ratio"]["p50"]


def test_the_index_alone_says_that_nothing_was_compared():
    done = CliRunner().invoke(command, ["index", "--records", "4096", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    assert "not timed: redis: not asked for" in done.output


def test_a_redis_that_is_not_there_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["index", "--vs", "redis", "--records", "4096", "--rounds", "1", "--json"]
    result = json.loads(CliRunner().invoke(command, words).output)
    assert (result["speedup_vs_redis"], "apt install" in result["redis_skipped"]) == (None, True)
