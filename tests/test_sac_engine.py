"""The engine inside: exact, the sparse path really taken, and mutants that must not pass for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sac_harness import Engine, requests

from emu.errors import StoreError
from emu.sac.designs import DESIGNS
from emu.sac.hot_buffer import HotBuffer
from emu.sac.plan import RunSpec
from emu.sac.step import DecodeStep, remote_runs
from emu.timing.oplog import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from emu.trace.request import Request

SPEC = RunSpec(gpus=2, devices=2, concurrency=3)
TRACE = requests((700, 5), (650, 6), (1100, 4), (130, 5), (90, 3), shared=1)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[RunSpec, list[Request]], Engine]]:
    made: list[Engine] = []

    def make(
        spec: RunSpec = SPEC, trace: list[Request] = TRACE, pools: int | None = None
    ) -> Engine:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Engine.make(directory, spec, trace, pools=pools))
        made[-1].prefill()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("design", ["cxl", "rdma", "hbm"])
def test_tokens_and_rows_equal_the_in_memory_run(engine, design: str) -> None:
    run = engine()
    decoded = run.decode(design)
    assert run.differences(decoded) == []
    assert sorted(record.number for record in decoded.records) == [0, 1, 2, 3, 4]
    if design != "hbm":
        assert decoded.misses > 0
        assert decoded.evictions > 0
        assert decoded.hits > 0


def test_fp8_rows_are_exact_too(engine) -> None:
    run = engine(replace(SPEC, kv_dtype="fp8"))
    assert run.differences(run.decode()) == []


def test_a_shared_prefix_is_stored_once_per_device(engine) -> None:
    spec = replace(SPEC, devices=1)
    run = engine(spec, requests((600, 2), (600, 2), shared=1))
    layout = run.model.layout
    # 8 shared blocks of 64 tokens; each request has 2 more for its prompt and 1 for its output
    assert run.pools[0].stats().used_bytes == (8 + 2 * (2 + 1)) * layout.block_bytes
    assert [delivery.computed_tokens for delivery in run.deliveries] == [599, 599 - 512]
    assert run.differences(run.decode()) == []


def test_space_returns_when_the_last_reader_is_done(engine) -> None:
    run = engine()
    run.decode()
    for plan in run.plans:
        run.pools[plan.device].delete([plan.key])
    assert [store.stats().used_bytes for store in run.pools] == [0, 0]


def test_a_missed_write_back_is_caught(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine()
    monkeypatch.setattr(DecodeStep, "_write_back", lambda *_: None)
    try:
        differences = run.differences(run.decode())
    except (StoreError, ValueError):
        return  # noticed by the store: the row was read, or asked for, and is not there
    assert differences


def test_a_write_back_of_the_wrong_row_is_caught(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine()
    honest = DecodeStep._write_back

    def wrong(self, batch, layer, place, projections) -> None:
        for projection in projections:
            projection.kv_rows[0, 7] ^= 1
        honest(self, batch, layer, place, projections)

    monkeypatch.setattr(DecodeStep, "_write_back", wrong)
    assert run.differences(run.decode())


def test_a_newest_row_in_the_wrong_slot_is_caught(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine()
    monkeypatch.setattr(
        HotBuffer, "newest_row", lambda self, place: place * self.shape.rows_per_request
    )
    assert run.differences(run.decode())


def test_a_hot_buffer_that_forgets_to_fetch_is_caught(
    engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine()
    monkeypatch.setattr(DecodeStep, "_gather", lambda *_: None)
    assert run.differences(run.decode())


def test_the_operation_log_replays_to_the_same_times(engine) -> None:
    run = engine()
    run.decode()
    assert run.clock is not None
    start_ns, end_ns = replay(run.clock.log, run.clock.system)
    rows = run.clock.log.ops
    assert len(rows) > 100
    assert start_ns.tolist() == [row.start_ns for row in rows]
    assert end_ns.tolist() == [row.end_ns for row in rows]


@pytest.mark.parametrize(("design", "pools"), [("cxl", None), ("rdma-sparse", 1)])
def test_each_device_is_charged_for_its_own_rows(engine, design: str, pools: int | None) -> None:
    """One GPU's batch over three devices; the requests differ in length, so their bytes do too."""
    run = engine(replace(SPEC, gpus=1, devices=3, concurrency=5), pools=pools)
    decoded = run.decode(design)
    records = {record.number: record for record in decoded.records}
    read, written = [0] * 3, [0] * 3
    for op in run.clock.log.ops:
        if op.kind == "transfer":
            moved = written if op.label.startswith("write back") else read
            moved[op.device] += op.bytes
    for device in range(3):
        own = [plan for plan in run.plans if plan.device == device]
        assert read[device] == sum(records[plan.number].bytes_fetched for plan in own)
        tokens = sum(plan.request.output_tokens for plan in own)
        assert written[device] == tokens * run.model.layout.token_bytes
    if design == "rdma-sparse":
        links = run.clock.utilisation()
        assert [links[f"remote_dram[{d}]"].nbytes for d in range(3)] == [
            r + w for r, w in zip(read, written, strict=True)
        ]
    assert run.differences(decoded) == []


@pytest.mark.parametrize("design", ["rdma", "dram"])
def test_one_local_memory_is_read_at_once_whatever_device_a_request_was_placed_on(
    engine, design: str
) -> None:
    run = engine(replace(SPEC, gpus=1, devices=3, concurrency=5), pools=1)
    run.decode(design)
    for label in ("misses 0", "write back 1"):
        starts = [op.start_ns for op in run.clock.log.ops if op.label == label]
        assert starts
        assert len(set(starts)) == len(starts)


def test_round_1_charges_prefill_and_round_2_does_not(engine) -> None:
    in_pool, computed = (engine(replace(SPEC, round=number)).decode() for number in (2, 1))
    assert all(record.prefill_compute_ns == 0 for record in in_pool.records)
    assert all(record.prefill_compute_ns > 0 for record in computed.records)
    ttft_ns = [
        {r.number: r.token_ns[0] - r.arrival_ns for r in d.records} for d in (in_pool, computed)
    ]
    assert all(ttft_ns[1][number] > ttft_ns[0][number] for number in ttft_ns[0])


def test_ttft_is_the_sum_of_its_parts(engine) -> None:
    decoded = engine().decode()
    for record in decoded.records:
        before_step = (
            record.arrival_ns
            + record.prefill_compute_ns
            + record.attach_transfer_ns
            + record.queue_ns
        )
        assert record.queue_ns >= 0
        assert record.token_ns[0] > before_step + record.stall_ns[0] - 1
        assert len(record.tokens) == len(record.token_ns) == len(record.stall_ns)


@pytest.mark.parametrize("arrivals", ["closed", "trace"])
@pytest.mark.parametrize("design", sorted(DESIGNS.keys() - {"rdma-gather"}))  # files pack no rows
def test_what_a_late_paced_run_waits_for_bytes_is_the_model_s(
    engine, design: str, arrivals: str
) -> None:
    """At dilation 1 every host is late, and none of its own work may pass for waiting."""
    trace = [replace(r, arrival_ms=0.7 * i) for i, r in enumerate(TRACE)]
    spec = replace(SPEC, arrivals=arrivals, round=1)
    exact, paced = (
        {record.number: record for record in engine(each, trace).decode(design).records}
        for each in (spec, replace(spec, time="paced"))
    )
    for number, record in paced.items():
        assert record.attach_transfer_ns == exact[number].attach_transfer_ns
        assert record.stall_ns == exact[number].stall_ns
        assert record.queue_ns == exact[number].queue_ns
        assert record.token_ns[0] > exact[number].token_ns[0]
        if design == "hbm":
            assert set(record.stall_ns) == {0}


def test_an_open_loop_keeps_the_trace_s_times(engine) -> None:
    trace = [replace(r, arrival_ms=5.0 * i) for i, r in enumerate(TRACE)]
    run = engine(replace(SPEC, arrivals="trace"), trace)
    decoded = run.decode()
    assert {r.number: r.arrival_ns for r in decoded.records} == {
        i: 5_000_000 * i for i in range(len(trace))
    }
    assert all(record.queue_ns >= 0 for record in decoded.records)
    assert run.differences(decoded) == []


def test_gpu_memory_limits_the_batch(engine) -> None:
    spec = replace(SPEC, gpus=1, concurrency=5)
    wide = engine(spec).decode()
    limited = engine(replace(spec, hbm_bytes=wide.local_bytes // 2))
    narrow = limited.decode()
    assert narrow.local_bytes <= limited.spec.hbm_bytes < wide.local_bytes
    assert limited.differences(narrow) == []


def test_remote_runs_are_read_in_order() -> None:
    tokens = np.array([[5, 6, 7, 63, 64, 65, -1, -1], [9, 8, 7, 20, 22, -1, -1, -1]], np.int32)
    # 5-7, 63, 64-65 (another block); 9, 8, 7, 20, 22
    assert remote_runs(tokens, 64) == 3 + 5
    assert remote_runs(np.full((2, 3), -1, np.int32), 64) == 0
