"""The shadow medium for users: each primitive left out of a right protocol is named, and the right one is silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from emu.testing import Host, find_violation

if TYPE_CHECKING:
    from collections.abc import Callable

SEQUENCE, RECORD, NBYTES = (
    0,
    64,
    128,
)  # a sequence number on a line of its own, a record of two lines
ROUNDS = 3


def writer(host: Host, without: str = "", *, streamed: bool = False) -> None:
    """A seqlock's writer: odd while the record is being written."""
    for round_number in range(1, ROUNDS + 1):
        publish(host, 2 * round_number - 1)
        if streamed:
            host.stream(RECORD, bytes([round_number]) * NBYTES)
        else:
            host.store(RECORD, bytes([round_number]) * NBYTES)
            if without == "half flush":
                host.flush(RECORD, 64)
            elif without != "writer's flush":
                host.flush(RECORD, NBYTES)
        if without != "writer's fence":
            host.fence()
        publish(host, 2 * round_number)


def publish(host: Host, sequence: int) -> None:
    host.store(SEQUENCE, sequence.to_bytes(8, "little"))
    host.flush(SEQUENCE, 8)
    if sequence % 2:
        host.fence()


def reader(host: Host, without: str = "") -> None:
    for _ in range(6):
        first = sequence_of(host)
        if first % 2:
            continue
        if without != "reader's flush":
            host.flush(RECORD, NBYTES)
        if without != "reader's fence":
            host.fence()
        record = host.load(RECORD, NBYTES)
        if without == "check" or sequence_of(host) == first:
            accepted = host.accept(record)
            assert accepted == bytes([first // 2]) * NBYTES or without


def sequence_of(host: Host) -> int:
    host.flush(SEQUENCE, 8)
    host.fence()
    return int.from_bytes(host.load(SEQUENCE, 8), "little")


def play(without: str, *, streamed: bool = False, seeds: range = range(400)) -> object:
    return find_violation(
        [lambda host: writer(host, without, streamed=streamed), lambda host: reader(host, without)],
        nbytes=192,
        seeds=seeds,
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_a_right_protocol_is_silent(streamed: bool) -> None:
    assert play("", streamed=streamed) is None


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        ("writer's flush", "flush by host 0 after store at 0x40"),
        ("half flush", "flush by host 0 after store at 0x40"),
        ("writer's fence", "fence by host 0 after the flush of store at 0x40"),
        ("reader's flush", "flush by host 1 before load at "),
        ("reader's fence", "fence by host 1 between flush and load at "),
        ("check", "check by host 1 that the record was whole"),
    ],
)
def test_what_is_left_out_is_named(without: str, missing: str) -> None:
    found = play(without)
    assert found is not None, "not seen in any schedule"
    assert found.missing.startswith(missing), found
    assert found.hosts == (0, 1)
    assert found.kind in ("stale", "torn")
    assert found.line == found.address // 64
    assert RECORD <= found.address < RECORD + NBYTES
    if without == "half flush":
        assert found.line == 2, "the line that was flushed is not the one"
    assert find_violation_again(found.seed, without) == found


def find_violation_again(seed: int, without: str) -> object:
    return play(without, seeds=range(seed, seed + 1))


def test_a_stream_without_a_fence() -> None:
    found = play("writer's fence", streamed=True)
    assert found is not None
    assert found.missing == "fence by host 0 after stream at 0x40"


def test_two_writers_in_one_line() -> None:
    def write(at: int) -> Callable[[Host], None]:
        return lambda host: host.store(at, b"x" * 8)

    found = find_violation([write(0), write(8)], nbytes=64, seeds=range(50))
    assert found is not None
    assert found.kind == "two writers"
    assert find_violation([write(0), write(64)], nbytes=128, seeds=range(50)) is None


def test_who_waits_for_ever_and_who_raises() -> None:
    def wait(host: Host) -> None:
        while host.load(0, 8) == bytes(8):
            host.pause()

    stuck = find_violation([wait], nbytes=64, seeds=[0], max_steps=200)
    assert stuck is not None
    assert stuck.kind == "stuck"

    def outside(host: Host) -> None:
        host.load(60, 8)

    raised = find_violation([outside], nbytes=64, seeds=[0])
    assert raised is not None
    assert raised.kind == "error"
    assert "IndexError" in raised.missing
    with pytest.raises(ValueError, match="multiple of 64"):
        find_violation([wait], nbytes=65)
