"""Live links and paced time: sharing between processes, real waiting, what a store is charged."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu import _native
from emu.errors import UserError
from emu.timing.clock import make_clock
from emu.timing.pace import dilation_to_hold, measure_gather_gb_per_s
from emu.timing.store_timing import store_timing
from emu.timing.system import System

LINKS = [(100.0, 10.0, 5.0, 0.0), (50.0, 20.0, 20.0, 7.5)]


def set_up(engine, parallelism=16):
    for link in LINKS:
        engine.add_link(*link)
    links, flags = np.array([0, 1], np.int32), np.zeros(2, np.bool_)
    return [
        engine.add_path(links, flags, False, 500.0, parallelism),
        engine.add_path(links[:1], flags[:1], True, 0.0, parallelism),
    ]


def live(dilation=1000.0, words=None, source="auto"):
    return _native.LinkClock(np.zeros(128, np.uint8) if words is None else words, dilation, source)


@pytest.mark.parametrize("source", ["auto", "clock_gettime"])
def test_live_links_follow_the_virtual_ones(source):
    clock, engine = live(source=source), _native.TimeEngine()
    paths = set_up(clock)
    assert set_up(engine) == paths
    rng = np.random.default_rng(3)
    start_ns = 1000
    for _ in range(200):
        start_ns += int(rng.integers(0, 3000))
        path = int(rng.integers(0, 2))
        nbytes, rows = int(rng.integers(0, 50_000)), int(rng.integers(0, 100))
        expected = engine.transfer(path, start_ns, nbytes, rows)
        assert clock.reserve(path, start_ns, nbytes, rows) == pytest.approx(expected, abs=2)


def test_a_word_is_shared_by_everyone_who_maps_it():
    words = np.zeros(128, np.uint8)
    clocks = [live(words=words) for _ in range(2)]
    for clock in clocks:
        set_up(clock)
    ends = [clocks[number % 2].reserve(1, 1_000_000, 5000, 1) for number in range(20)]
    # one after the other, 1000 ns each, although two clocks took turns
    assert np.diff(ends) == pytest.approx(np.full(19, 1000), abs=2000)
    assert ends[-1] - ends[0] == pytest.approx(19_000, abs=2000)
    assert words[:8].any()
    assert not words[8:].any()


def test_waiting_takes_the_dilated_time_and_says_how_long():
    clock = live(dilation=20.0)
    begin = time.perf_counter_ns()
    target_ns = clock.now_ns() + 500_000
    waited_ns = clock.wait_until_ns(target_ns)
    host_ns = time.perf_counter_ns() - begin
    assert clock.now_ns() >= target_ns
    assert 9_000_000 <= waited_ns <= host_ns  # 10 ms, less what passed before the wait
    assert clock.wait_until_ns(target_ns) == 0


def test_time_does_not_run_backwards():
    clock = live(dilation=1.0)
    seen = [clock.now_ns() for _ in range(10_000)]
    assert seen == sorted(seen)


def test_the_clock_says_where_its_ticks_come_from():
    clock = live()
    assert clock.source in {"tsc", "clock_gettime"}
    assert live(source="clock_gettime").source == "clock_gettime"
    assert live(source="clock_gettime").ticks_per_ns == 1.0
    if (
        clock.source == "clock_gettime"
    ):  # then the processor's counter must be refused, with the reason
        with pytest.raises(RuntimeError, match="no usable TSC: the"):
            live(source="tsc")
    else:
        assert live(source="tsc").ticks_per_ns == clock.ticks_per_ns > 0.1


def test_impossible_clocks_are_refused():
    with pytest.raises(ValueError, match="dilation"):
        live(dilation=0.0)
    with pytest.raises(ValueError, match="source"):
        live(source="sundial")
    with pytest.raises(ValueError, match="aligned"):
        live(words=np.zeros(129, np.uint8)[1:])
    with pytest.raises(TypeError):
        live(words=np.zeros(16, np.uint64))
    clock = live(words=np.zeros(127, np.uint8))
    clock.add_link(*LINKS[0])
    with pytest.raises(ValueError, match="64 bytes"):
        clock.add_link(*LINKS[1])


CLOSED_LOOP = """
import sys
from emu.timing.store_timing import store_timing
timing = store_timing("cxl-switch", "paced", dilation=300, shared=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
begin, charged = timing._now_ns(), 0
for _ in range(40):
    handle = timing.begin("read", 22_500, 1)
    charged += timing.end(handle)[0]
print(timing._now_ns() - begin, charged)
"""


def closed_loops(shared, count):
    """Each of `count` processes reads 40 times 22500 bytes (1 us each) from one device. Model ns of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLOSED_LOOP, str(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    totals = []
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        took_ns, charged_ns = map(int, out.split())
        assert took_ns >= charged_ns * 0.99  # nobody is ahead of the model
        totals.append(took_ns)
    return totals


def test_two_processes_share_one_devices_bandwidth(tmp_path):
    """Alone: 40 * (1 us + 0.75 us of latency). Together the link is the limit: at least 2 * 40 * 1 us."""
    alone = closed_loops(tmp_path / "one", 1)[0]
    together = closed_loops(tmp_path / "two", 2)
    assert alone >= 40 * 1750 * 0.99
    assert max(together) >= 80_000 * 0.95
    assert max(together) < 200 * alone  # and it goes on, however busy this machine is


def test_a_paced_run_keeps_to_the_model():
    system = System.load("sac-server", gpus=2)

    def run(mode):
        clock = make_clock(system, mode, 100.0)

        def gpu(number):
            path = system.path("pool_read.cxl", number, 0)
            for _ in range(4):
                read = clock.transfer(f"gpu{number}", path, 1152 * 2048, 2048, "kv")
                yield clock.compute(f"gpu{number}", 100_000, "attention")
                yield read

        for number in range(2):
            clock.spawn(f"gpu{number}", gpu(number))
        begin = time.perf_counter_ns()
        clock.run()
        return clock, time.perf_counter_ns() - begin

    virtual, _ = run("virtual")
    paced, host_ns = run("paced")
    assert host_ns >= 100 * virtual.now_ns
    assert 1.0 <= paced.now_ns / virtual.now_ns < 3.0
    assert paced.now_ns <= host_ns / 100
    for real, model in zip(paced.log.ops, virtual.log.ops, strict=True):
        assert (real.actor, real.bytes) == (model.actor, model.bytes)
        assert real.start_ns >= model.start_ns
        assert real.end_ns >= model.end_ns
    assert paced.pace.late_ns >= 0
    assert paced.pace.paceable_gb_per_s() > 0


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e8)), min_size=1, max_size=40),
    st.integers(1, 10**6),
)
def test_the_dilation_to_hold_is_the_least_that_holds(waits, within_ns):
    """Against one wait after the other, played through."""
    times_ns = np.cumsum([between for between, _ in waits])
    work_ns = np.array([work for _, work in waits])

    def late_ns(dilation):
        now_ns, worst = 0.0, 0.0
        for time_ns, work in zip(times_ns, work_ns, strict=True):
            now_ns += work / dilation
            worst = max(worst, now_ns - time_ns)
            now_ns = max(now_ns, time_ns)
        return worst

    found = dilation_to_hold(times_ns, work_ns, within_ns)
    assert late_ns(found) <= within_ns * 1.001
    assert found < 0.0011 or late_ns(found / 1.002) > within_ns * 0.999


def test_a_run_that_was_late_says_the_dilation_that_it_needed():
    """20 ms of real work in each model millisecond."""
    clock = make_clock(System.load("laptop"), "paced", 1.0)

    def worker():
        for _ in range(5):
            op = clock.compute("worker", 1_000_000, "work")
            time.sleep(0.02)
            yield op

    clock.spawn("worker", worker())
    clock.run()
    assert clock.pace.late_ns > 5 * 19_000_000 - 1_000_000
    needed = clock.pace.dilation_to_hold(100_000)
    assert needed > 5 * 20 / 5.1
    assert needed <= (5_000_000 + clock.pace.late_ns) / 1_100_000 * 1.002  # all of it in one wait


def test_real_work_is_absorbed():
    """Real work of 15 ms inside computes of 20 ms host time: on top it would make 35 ms of each."""

    def run_ns(work_s):
        clock = make_clock(System.load("laptop"), "paced", 20.0)

        def worker():
            for _ in range(5):
                op = clock.compute("core", 1_000_000, "x")
                time.sleep(work_s)
                yield op

        clock.spawn("core", worker())
        clock.run()
        return clock.now_ns

    fastest_ns = min(run_ns(0.015) for _ in range(3))
    assert 5_000_000 <= fastest_ns < 7_000_000


def test_the_probe_measures_something():
    assert 0.01 < measure_gather_gb_per_s() < 1000


# -- stores -------------------------------------------------------------------------------------------------
def test_a_store_is_charged_by_its_medium():
    timing = store_timing("cxl-switch", "virtual")
    # 16 rows in one round: 750 ns, then 16 * 656 bytes at 22.5 GB/s = 466.5 ns
    assert timing.end(timing.begin("read", 16 * 656, 16)) == (1217, 0)
    assert timing.end(timing.begin("read", 16 * 656, 16)) == (1217, 0)
    # 2048 rows: 128 rounds of latency are longer than the bytes
    assert timing.end(timing.begin("read", 2048 * 656, 2048)) == (128 * 750, 0)
    assert timing.end(timing.begin("write", 0, 0)) == (0, 0)


def test_reads_in_flight_together_share_the_link():
    timing = store_timing("dram")
    first, second = timing.begin("read", 280_000, 1), timing.begin("read", 280_000, 1)
    assert (timing.end(first)[0], timing.end(second)[0]) == (1110, 2110)


def test_software_coherence_costs_a_flush_per_line():
    plain = store_timing("cxl-switch")
    flushed = store_timing("cxl-switch", software_coherence=True)
    charged = [timing.end(timing.begin("write", 656, 1))[0] for timing in (plain, flushed)]
    assert charged[1] - charged[0] == round(23.8 * 11)


def test_paced_stores_wait():
    timing = store_timing("cxl-switch", "paced", dilation=1000)
    charged_ns, waited_ns = timing.end(timing.begin("read", 22_500, 1))
    assert charged_ns == pytest.approx(1750, abs=2)
    assert waited_ns > 0
    handle = timing.begin("read", 22_500, 1)
    time.sleep(0.02)  # the real copy took longer than the model: nothing to wait for
    assert timing.end(handle)[1] == 0


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(UserError, match="no media profile"):
        store_timing("cxl")
    with pytest.raises(UserError, match="store timing mode"):
        store_timing(mode="off")
    with pytest.raises(UserError, match="dilation"):
        store_timing(mode="paced", dilation=0)
    with pytest.raises(UserError, match="needs mode 'paced'"):
        store_timing(shared=tmp_path / "link")
    with pytest.raises(UserError, match="cannot be opened"):
        store_timing(mode="paced", shared=tmp_path)
    with pytest.raises(UserError, match="store operation"):
        store_timing().begin("erase", 1, 1)


def test_a_shared_file_belongs_to_one_profile_and_dilation(tmp_path):
    file = tmp_path / "link"
    store_timing(mode="paced", dilation=30, shared=file)
    store_timing(mode="paced", dilation=30, shared=file)
    for other in ({"dilation": 31}, {"dilation": 30, "profile": "dram"}):
        with pytest.raises(UserError, match="another profile or dilation"):
            store_timing(mode="paced", shared=file, **other)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    with pytest.raises(UserError, match="is no shared link file"):
        store_timing(mode="paced", shared=foreign)
    assert foreign.read_text() == "mine"


def test_a_word_of_an_earlier_boot_is_forgotten(tmp_path):
    file = tmp_path / "link"
    store_timing(mode="paced", dilation=1, shared=file)
    raw = bytearray(file.read_bytes())
    raw[8:24] = b"some other boot!"
    raw[64:72] = b"\xff" * 7 + b"\x0f"  # busy for ages
    file.write_bytes(raw)
    timing = store_timing(mode="paced", dilation=1, shared=file)
    charged_ns, _ = timing.end(timing.begin("read", 22_500, 1))
    assert charged_ns == pytest.approx(1750, abs=5)
