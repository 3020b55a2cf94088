"""Operation logs: replayed to the times of their run, written and read; what is no log is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oplog_times import replayed, times

from emu.errors import UserError
from emu.timing.clock import make_clock
from emu.timing.oplog import OpLog, OpRow
from emu.timing.system import System

PATHS = ("pool_read.cxl", "pool_write.cxl", "pool_read.rdma", "pool_pack.rdma", "hbm")


@pytest.fixture(scope="module")
def system():
    return System.load("sac-server", gpus=4, devices=2)


# -- random programs ----------------------------------------------------------------------------------------
STEP = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, 3), st.integers(0, 50_000)),
    st.tuples(
        st.just("transfer"),
        st.sampled_from(PATHS),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(0, 1 << 22),
        st.integers(0, 3000),
    ),
    st.tuples(st.just("wait"), st.integers(1, 20)),
    st.tuples(st.just("until"), st.integers(0, 400_000)),
    st.tuples(st.just("fire"), st.integers(0, 3)),
    st.tuples(st.just("signal"), st.integers(0, 3)),
)
PROGRAMS = st.lists(st.lists(STEP, max_size=12), min_size=1, max_size=6)


def interpret(system: System, programs, mode="virtual"):
    """Run actors made of steps; every odd one is spawned by the one before it. Returns the clock."""
    clock = make_clock(system, mode)
    signals = [clock.signal(str(number)) for number in range(4)]

    def actor(number):
        if number + 1 < len(programs) and number % 2 == 0:
            clock.spawn(f"actor{number + 1}", actor(number + 1))
        pending = []
        for kind, *arguments in programs[number]:
            if kind == "compute":
                pending.append(clock.compute(f"gpu{arguments[0]}", arguments[1], "compute"))
            elif kind == "transfer":
                name, gpu, device, nbytes, rows = arguments
                path = system.path(name, gpu, device)
                pending.append(clock.transfer(f"gpu{gpu}", path, nbytes, rows, "transfer"))
            elif kind == "wait":
                yield pending[-arguments[0] :]
            elif kind == "until":
                yield arguments[0]
            elif kind == "fire":
                signals[arguments[0]].fire()
            else:
                yield signals[arguments[0]]

    def release():
        yield 10_000_000
        for signal in signals:
            signal.fire()
            yield clock.now_ns + 1

    for number in range(0, len(programs), 2):
        clock.spawn(f"actor{number}", actor(number))
    clock.spawn("release", release())
    clock.run()
    return clock


@settings(deadline=None, max_examples=150)
@given(PROGRAMS)
def test_live_times_are_the_replayed_times(programs):
    system = System.load("sac-server", gpus=4, devices=2)
    clock = interpret(system, programs)
    assert times(clock.log) == replayed(clock.log, system)
    starts = [op.start_ns for op in clock.log.ops]
    assert starts == sorted(starts)


@pytest.mark.parametrize("mode", ["off", "paced"])
def test_the_log_of_a_real_run_replays_to_the_virtual_times(system, mode):
    steps = [
        ("transfer", "pool_read.cxl", 0, 1, 1 << 20, 900),
        ("compute", 0, 20_000),
        ("wait", 2),
        ("transfer", "pool_read.rdma", 1, 0, 4096, 4),
        ("until", 150_000),
        ("compute", 1, 777),
        ("wait", 1),
        ("wait", 20),
        ("compute", 1, 5),
    ]
    virtual, real = interpret(system, [steps]), interpret(system, [steps], mode)
    assert replayed(real.log, system) == times(virtual.log)
    assert all(0 <= op.start_ns <= op.end_ns for op in real.log.ops)


@settings(deadline=None, max_examples=20)
@given(PROGRAMS)
def test_a_log_survives_the_file(tmp_path_factory, programs):
    system = System.load("sac-server", gpus=4, devices=2)
    log = interpret(system, programs).log
    file = tmp_path_factory.mktemp("log") / "ops.jsonl"
    log.write(file)
    again = OpLog.read(file)
    assert again.ops == log.ops


# -- files that are not logs --------------------------------------------------------------------------------
def damaged(**change):
    row = OpRow(kind="compute", actor="a")
    for key, value in change.items():
        setattr(row, key, value)
    log = OpLog()
    log.ops = [row]
    return log


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": 3}, "id is 3, wanted 0"),
        ({"kind": "copy"}, "kind is 'copy'"),
        ({"after": (0,)}, "after names"),
        ({"bytes": -1}, "bytes is -1"),
        ({"rows": True}, "rows is True"),
        ({"label": 5}, "label is 5"),
        ({"end_ns": 1.5}, r"end_ns is 1\.5"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, change, reason):
    file = tmp_path / "ops.jsonl"
    damaged(**change).write(file)
    with pytest.raises(UserError, match=rf"ops\.jsonl, line 2: {reason}"):
        OpLog.read(file)


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_file_is_refused(tmp_path, system, cut):
    clock = make_clock(system)
    for _ in range(3):
        clock.compute("gpu0", 5, "x")
    file = tmp_path / "ops.jsonl"
    clock.log.write(file)
    assert len(OpLog.read(file)) == 3
    text = file.read_text()
    file.write_text(text[: -cut - 1])
    with pytest.raises(UserError, match=r"ops\.jsonl"):
        OpLog.read(file)


@pytest.mark.parametrize(
    "content", ["", "[]\n", '{"schema_version": 99, "ops": 0}\n', "\x00\x01\n"]
)
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "ops.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=r"ops\.jsonl, line 1"):
        OpLog.read(file)


def test_paths_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        OpLog.read(tmp_path / "none")
    with pytest.raises(UserError, match="cannot be written"):
        OpLog().write(tmp_path)
