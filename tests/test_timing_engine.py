"""The native time engine against hand-computed cases and a Python reference."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from time_reference import Link, Op, Path, Reference

from emu import _native

GB = 1_000_000_000


def engine_with(*links, paths=()):
    engine = _native.TimeEngine()
    for link in links:
        engine.add_link(*link)
    for path in paths or [Path(list(range(len(links))))]:
        flags = path.one_message or [False] * len(path.links)
        engine.add_path(
            np.array(path.links, np.int32),
            np.array(flags, np.bool_),
            path.write,
            path.setup_ps / 1000,
            path.parallelism,
        )
    return engine


def columns(ops: list[Op]):
    offsets = np.zeros(len(ops) + 1, np.int64)
    np.cumsum([len(op.deps) for op in ops], out=offsets[1:])
    return (
        np.array([op.actor for op in ops], np.int32),
        np.array([op.path for op in ops], np.int32),
        np.array([op.nbytes for op in ops], np.int64),
        np.array([op.rows for op in ops], np.int64),
        np.array([op.duration_ns for op in ops], np.int64),
        offsets,
        np.array([dep for op in ops for dep in op.deps], np.int64),
        np.array([op.not_before_ns for op in ops], np.int64),
    )


def replay(engine, ops: list[Op]):
    starts, ends = engine.replay(*columns(ops))
    return starts.tolist(), ends.tolist()


def test_one_idle_link_by_hand():
    engine = engine_with((100.0, 10.0, 5.0, 0.0))
    # 1000 bytes at 10 bytes per ns, then 100 ns of latency
    assert engine.transfer(0, 0, 1000, 1) == 200
    # the link was idle since 100: pulled forward to the start
    assert engine.transfer(0, 5000, 1000, 1) == 5200
    assert engine.link_busy_ns() == [200]
    assert engine.link_bytes() == [2000]


def test_write_uses_the_write_bandwidth():
    engine = engine_with((0.0, 10.0, 5.0, 0.0), paths=[Path([0], write=True)])
    assert engine.transfer(0, 0, 1000, 1) == 200


def test_request_rate_bounds_small_rows():
    engine = engine_with((0.0, 10.0, 10.0, 320.0))
    assert engine.transfer(0, 0, 100 * 160, 100) == 32_000  # not the 1600 ns of its bytes


def test_outstanding_requests_bound_by_latency():
    engine = engine_with((400.0, 1000.0, 1000.0, 0.0), paths=[Path([0], parallelism=16)])
    assert engine.transfer(0, 0, 2048, 2048) == 400 * 128


def test_setup_is_paid_once_and_does_not_occupy_the_link():
    engine = engine_with((0.0, 1.0, 1.0, 0.0), paths=[Path([0], setup_ps=500_000)])
    assert engine.transfer(0, 0, 1000, 7) == 1500
    assert engine.transfer(0, 0, 1000, 7) == 2500
    assert engine.link_busy_ns() == [2000]


def test_the_slowest_link_decides_and_latencies_add_up():
    engine = engine_with((10.0, 10.0, 10.0, 0.0), (20.0, 2.0, 2.0, 0.0), (30.0, 5.0, 5.0, 0.0))
    assert engine.transfer(0, 0, 1000, 1) == 500 + 60
    assert engine.link_busy_ns() == [100, 500, 200]


def test_a_message_link_sees_one_request():
    links = ((0.0, 1000.0, 1000.0, 30.0), (0.0, 1000.0, 1000.0, 320.0))
    engine = engine_with(*links, paths=[Path([0, 1], [False, True])])
    assert engine.transfer(0, 0, 64, 100) == 3000


def test_no_bytes_end_at_once_and_no_rows_count_as_one():
    engine = engine_with((100.0, 1.0, 1.0, 0.0))
    assert engine.transfer(0, 77, 0, 5) == 77
    assert engine.link_busy_ns() == [0]
    assert engine.transfer(0, 0, 1000, 0) == 1100


def test_a_path_without_links_takes_no_time():
    engine = engine_with(paths=[Path([])])
    assert engine.transfer(0, 42, 10 * GB, 1000) == 42


def test_two_actors_halve_each_others_bandwidth():
    engine = engine_with((0.0, 20.0, 20.0, 0.0), paths=[Path([0]), Path([0])])
    ends = [0, 0]
    for _ in range(100):  # closed loop: each actor submits when its last transfer has ended
        for actor in (0, 1):
            ends[actor] = engine.transfer(actor, ends[actor], 20_000, 1)
    total_ns = max(ends)
    assert total_ns == 2 * 100 * 1000
    shares = [100 * 20_000 / total_ns for _ in ends]
    assert shares == [10.0, 10.0]
    assert abs(ends[0] - ends[1]) <= 1000


def test_computes_of_one_actor_queue():
    engine = _native.TimeEngine()
    assert engine.compute(3, 10, 100) == 110
    assert engine.compute(3, 20, 100) == 210
    assert engine.compute(4, 20, 100) == 120
    assert engine.compute(-1, 20, 100) == 120  # a delay of nobody


def test_many_small_transfers_lose_no_time_to_rounding():
    engine = engine_with((0.0, 22.5, 22.5, 0.0))
    for _ in range(10_000):
        end_ns = engine.transfer(0, 0, 1152, 1)
    assert end_ns == 512_000  # 51.2 ns each


def test_reset_forgets():
    engine = engine_with((0.0, 1.0, 1.0, 0.0))
    engine.transfer(0, 0, 1000, 1)
    engine.compute(0, 0, 50)
    engine.reset()
    assert engine.transfer(0, 0, 1000, 1) == 1000
    assert engine.compute(0, 0, 50) == 50


@pytest.mark.parametrize(
    ("path", "start_ns", "nbytes", "rows"),
    [(1, 0, 1, 1), (-1, 0, 1, 1), (0, -1, 1, 1), (0, 0, -1, 1), (0, 0, 1, -1), (0, 1 << 53, 1, 1)],
)
def test_nonsense_is_refused(path, start_ns, nbytes, rows):
    engine = engine_with((0.0, 1.0, 1.0, 0.0))
    with pytest.raises(ValueError, match=r".+"):
        engine.transfer(path, start_ns, nbytes, rows)
    assert engine.link_busy_ns() == [0]


def test_times_past_the_range_are_refused():
    engine = engine_with((0.0, 1e-6, 1e-6, 0.0))
    with pytest.raises(OverflowError):
        engine.transfer(0, 0, 1 << 50, 1)


@pytest.mark.parametrize(
    "link", [(-1.0, 1.0, 1.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 1.0, float("nan"), 0.0)]
)
def test_impossible_links_are_refused(link):
    with pytest.raises(ValueError, match=r".+"):
        _native.TimeEngine().add_link(*link)


def test_replay_refuses_dependencies_on_later_operations():
    engine = engine_with((0.0, 1.0, 1.0, 0.0))
    good = Op(0, 0, 1, 1, 0, [], 0)
    for deps in ([1], [2], [-1]):
        with pytest.raises(ValueError, match="earlier"):
            replay(engine, [good, Op(0, 0, 1, 1, 0, deps, 0)])


def test_replay_refuses_columns_of_another_type():
    engine = engine_with((0.0, 1.0, 1.0, 0.0))
    wrong = np.zeros(1, np.float64)
    with pytest.raises(TypeError):
        engine.replay(*[wrong] * 8)


LINKS = st.tuples(st.floats(0, 1000), st.floats(0.5, 600), st.floats(0.5, 600), st.floats(0, 400))


@st.composite
def systems(draw):
    links = draw(st.lists(LINKS, min_size=1, max_size=4))
    paths = []
    for _ in range(draw(st.integers(1, 3))):
        hops = draw(st.lists(st.integers(0, len(links) - 1), max_size=3, unique=True))
        flags = draw(st.lists(st.booleans(), min_size=len(hops), max_size=len(hops)))
        setup_ps = draw(st.integers(0, 2_000_000))
        paths.append(Path(hops, flags, draw(st.booleans()), setup_ps, draw(st.integers(1, 64))))
    return links, paths


@st.composite
def logs(draw, num_paths):
    ops = []
    for number in range(draw(st.integers(0, 40))):
        deps = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        ops.append(
            Op(
                actor=draw(st.integers(-1, 3)),
                path=draw(st.integers(-1, num_paths - 1)),
                nbytes=draw(st.integers(0, 1 << 24)),
                rows=draw(st.integers(0, 4096)),
                duration_ns=draw(st.integers(0, 100_000)),
                deps=deps,
                not_before_ns=draw(st.integers(0, 200_000)),
            )
        )
    return ops


def both(links, paths):
    return engine_with(*links, paths=paths), Reference([Link.of(*link) for link in links], paths)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_replay_equals_the_reference(data):
    links, paths = data.draw(systems())
    ops = data.draw(logs(len(paths)))
    engine, reference = both(links, paths)
    times = replay(engine, ops)
    assert times == reference.replay(ops)
    assert replay(engine, ops) == times  # a replay begins from idle links


def decode_like(gpus: int, steps: int) -> list[Op]:
    """Each GPU reads, then computes, step after step; all read from one shared link."""
    ops: list[Op] = []
    for step in range(steps):
        for gpu in range(gpus):
            before = [(step - 1) * 2 * gpus + 2 * gpu + 1] if step else []
            ops.append(Op(gpu, gpu, 40_000, 35, 0, before, 0))
            ops.append(Op(gpu, -1, 0, 0, 60_000, [len(ops) - 1], 0))
    return ops


def test_replay_is_many_times_faster_than_a_heap_in_python():
    gpus, steps = 64, 400
    links = [(700.0, 20.0, 20.0, 0.0)] * 9
    paths = [Path([gpu % 8, 8], [False, False], parallelism=16) for gpu in range(gpus)]
    ops = decode_like(gpus, steps)
    engine, reference = both(links, paths)
    begin = time.process_time()
    expected = reference.replay(ops)
    python_s = time.process_time() - begin
    table, native_s = columns(ops), []
    for _ in range(3):
        begin = time.process_time()
        starts, ends = engine.replay(*table)
        native_s.append(time.process_time() - begin)
    assert (starts.tolist(), ends.tolist()) == expected
    assert len(ends) == 2 * gpus * steps
    assert python_s / min(native_s) > 5
