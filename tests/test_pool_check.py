"""`emu pool`: what it shows of a sound pool, what it finds in a damaged one, and what it can mend."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from contract_base import child
from small_pool import DEVICE_BYTES, LAYOUT, NUM_BLOCKS, read_slot, rows_of

from emu import StoreOptions, open_store
from emu.cli.main import cli
from emu.errors import EmuError, MediumError, UserError
from emu.pool.header import parse_page
from emu.pool.inspect import clear, inspect, repair

KEYS = ("a", "b", "c")
LINE = 64


@pytest.fixture
def device(tmp_path):
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    path = folder / f"emu-test-{tmp_path.name}-{random.randrange(1 << 40):x}"
    path.write_bytes(bytes(DEVICE_BYTES))
    yield path
    path.unlink(missing_ok=True)


def opened(device, **options):
    return open_store(f"cxl://{device}", LAYOUT, StoreOptions(**options))


def fill(device, rounds=1):
    """Three requests, more transactions than a log holds with many rounds."""
    with opened(device) as store:
        for key in KEYS:
            store.put([key], [rows_of(key, 100)])
        for _ in range(rounds):
            for slot in store.slots(["a"]):
                store.detach(int(slot))
            store.slots(["a"])


def lines(device):
    """Offsets of the metadata's lines that are not zero."""
    raw = np.fromfile(device, np.uint64).reshape(-1, 8)
    begin = parse_page(device.read_bytes()[:4096]).meta_offset
    used = raw.any(axis=1).nonzero()[0] * LINE
    return begin, used[used >= begin]


def flip(device, offset, bit):
    with device.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def run(*words):
    return CliRunner().invoke(cli, ["pool", *map(str, words)])


def slot_offset(device, slot):
    header = parse_page(device.read_bytes()[:4096])
    sizes = header.metadata
    return header.meta_offset + slot * sizes.nbytes // sizes.slots


def test_a_sound_pool_is_shown(device):
    fill(device)
    found = inspect(str(device))
    assert (found.problems, found.alive) == ((), [])
    assert {one.key: one.num_tokens for one in found.requests} == dict.fromkeys(KEYS, 100)
    assert found.used_blocks == 6
    dumped = json.loads(run("dump", device).output)["pools"][0]
    assert dumped["num_blocks"] == NUM_BLOCKS
    assert (
        json.loads(run("ls", device, "--json").output)["pools"][0]["requests"] == dumped["requests"]
    )
    assert "requests" not in json.loads(run("stat", device, "--json").output)["pools"][0]
    table = run("ls", device).output.splitlines()
    assert table[0].split() == [
        "device",
        "key",
        "state",
        "tokens",
        "shared",
        "blocks",
        "leases",
        "generation",
    ]
    assert [line.split()[1] for line in table[1:]] == list(KEYS)
    assert f"6/{NUM_BLOCKS}" in run("stat", device).output
    checked = run("check", device)
    assert (checked.exit_code, "sound, 3 requests" in checked.output) == (0, True)


def test_looking_changes_nothing_and_disturbs_nobody(device):
    with opened(device) as store:
        store.put(["a"], [rows_of("a", 100)])
        before = device.read_bytes()[:4096], inspect(str(device)).transactions
        for verb in ("ls", "stat", "dump", "check"):
            assert run(verb, device).exit_code == 0
        assert (device.read_bytes()[:4096], inspect(str(device)).transactions) == before
        assert len(inspect(str(device)).alive) == 1
        assert store.exists(["a"])[0]


def hold_and_wait(pipe, device):
    store = opened(device)
    store.put(["held"], [rows_of("held", 10)])
    pipe.send("holding")
    pipe.recv()


def test_a_killed_holder_is_a_note_and_no_problem(device):
    with child(hold_and_wait, device) as other:
        other.get()
        other.kill()
        found = inspect(str(device))
        assert found.problems == ()
        assert any("is gone; the next writer ends its 1 leases" in note for note in found.notes)
        assert run("check", device).exit_code == 0


def test_damage_in_the_middle_of_a_log_is_found_and_mended(device):
    fill(device)
    log = slot_offset(device, 0) + 16 * LINE
    sound = device.read_bytes()
    flip(device, log + 3 * LINE + 30, 4)
    found = inspect(str(device))
    assert any("the log of slot 0 is damaged at line" in what for what in found.problems)
    checked = run("check", device)
    assert (checked.exit_code, isinstance(checked.exception, MediumError)) == (1, True)
    dry = run("check", "--repair", "--dry-run", device)
    assert dry.exit_code == 1
    assert inspect(str(device)).problems == found.problems
    before, after = repair(str(device))
    assert (before.problems, after.problems) == (found.problems, ())
    kept = {one.key for one in after.requests if one.state == "published"}
    assert kept < set(KEYS)
    with opened(device) as store:
        for key in KEYS:
            assert store.exists([key])[0] == (key in kept)
        for key in kept:
            assert (read_slot(store, int(store.slots([key])[0])) == rows_of(key, 100)["kv"]).all()
        store.delete(sorted(kept))
        store.reserve("all", NUM_BLOCKS * 64)  # no block is lost
    assert inspect(str(device)).problems == ()
    assert sound[:4096] == device.read_bytes()[:4096]


def test_a_damaged_snapshot_is_found(device):
    fill(device, rounds=400)  # several laps of the log
    header = parse_page(device.read_bytes()[:4096])
    first = slot_offset(device, 0) + (16 + header.metadata.ring_lines) * LINE
    for buffer in range(2):
        flip(device, first + buffer * header.metadata.snapshot_lines * LINE + 20, 1)
    assert any("snapshot of transaction" in what for what in inspect(str(device)).problems)
    with pytest.raises(MediumError, match="emu pool check") as refused:
        opened(device)
    assert refused.value.status == "METADATA_DAMAGED"
    _, after = repair(str(device))
    assert after.problems == ()
    opened(device).close()


def test_a_pool_that_somebody_has_open_is_not_written(device):
    with opened(device) as store:
        store.put(["a"], [rows_of("a", 100)])
        store.put(["b"], [rows_of("b", 100)])
        with pytest.raises(MediumError, match="may have it open"):
            clear(str(device))
        flip(device, slot_offset(device, 0) + 16 * LINE + 20, 0)
        with pytest.raises(MediumError, match="may have it open"):
            repair(str(device))


def test_format_gives_up_what_is_there_and_only_then(device):
    device.write_bytes(b"precious".ljust(DEVICE_BYTES, b"\0"))
    with pytest.raises(MediumError, match="emu pool format"):
        opened(device)
    assert "would be empty" in run("format", "--dry-run", device).output
    assert device.read_bytes()[:8] == b"precious"
    assert run("format", device).exit_code == 0
    with opened(device) as store:
        assert store.stats().used_bytes == 0


def test_what_is_no_pool_is_said(device, tmp_path):
    for path, words in ((device, "no pool is on it yet"), (tmp_path / "none", "cannot be opened")):
        with pytest.raises(UserError, match=words):
            inspect(str(path))


@pytest.mark.slow
def test_flipped_bits_are_found_or_harmless(device):
    """Never a crash, never wrong bytes: an error of ours, a miss, or the right bytes."""
    fill(device, rounds=150)
    begin, used = lines(device)
    sound = np.fromfile(device, np.uint8)
    medium = np.memmap(device, np.uint8, "r+")
    chosen = random.Random(1)
    refused = missed = right = 0
    for _ in range(10_000):
        medium[:] = sound
        live = (
            opened(device) if chosen.random() < 0.3 else None
        )  # one that runs while the bit flips
        anywhere = chosen.random() < 0.1
        offset = (
            chosen.randrange(begin, len(sound))
            if anywhere
            else int(chosen.choice(used)) + chosen.randrange(LINE)
        )
        if anywhere and chosen.random() < 0.5:
            offset = chosen.randrange(4096)
        medium[offset] ^= 1 << chosen.randrange(8)
        try:
            with live or opened(device) as store:
                there = store.exists(KEYS)
                for key, found in zip(KEYS, there, strict=True):
                    out = {"kv": np.zeros((2, 100, 64), np.uint8)}
                    if found and store.get([key], [out])[0]:
                        assert (out["kv"] == rows_of(key, 100)["kv"]).all(), (offset, key)
                        right += 1
                    else:
                        missed += 1
                store.put(["new"], [rows_of("new", 64)])
        except EmuError:
            refused += 1
    assert right > 1000
    assert refused > 0, (right, missed)
