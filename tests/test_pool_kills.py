"""Real processes on one pool, killed and stopped at random moments; then another host looks at what is there.

In full: 200 kills, and 8 processes for 5 minutes, which is longer than a test may otherwise take:
`scripts/test --long -o faulthandler_timeout=0 tests/test_pool_kills.py`.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pool_crew import EXPIRY_S, Crew, Job, check_slot, open_pool
from small_pool import DEVICE_BYTES, NUM_BLOCKS

from emu.errors import KeyMissing, StaleDescriptor
from emu.pool.inspect import inspect


@pytest.fixture
def folder(tmp_path):
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="emu-test-", dir=base) as path:
        (Path(path) / "cxl0").write_bytes(bytes(DEVICE_BYTES))
        yield Path(path)


@pytest.fixture
def crew(folder):
    crews = []

    def make(count):
        crews.append(Crew(folder / "cxl0", folder / "journal", count))
        return crews[-1]

    yield make
    for one in crews:
        one.end()


def keep_some(store, folder, kept):
    """Hold a few of the requests that the crew has published: they must outlive everything."""
    for key in (folder / "journal").read_text().splitlines()[-8:]:
        if len(kept) < 4 and key not in kept:
            with suppress(KeyMissing, StaleDescriptor):  # deleted or evicted just now
                kept[key] = store.attach(store.publish(key))


def check_from_another_host(folder, kept):
    """Everything that is published is whole, nothing is owned twice, nothing is lost."""
    device = str(folder / "cxl0")
    time.sleep(1.2 * EXPIRY_S)
    with open_pool(Job(device, "", "witness", coherent=False)) as witness:
        used = witness.stats().used_bytes // witness.layout.block_bytes  # buries the dead
        found = inspect(device)
        assert found.problems == ()
        assert found.used_blocks == used
        published = [one for one in found.requests if one.state == "published"]
        left = {one.key for one in found.requests if one.state != "published"}
        assert left <= set(kept), "a dead host's reservation stays"
        assert set(kept) <= {one.key for one in found.requests}
        for request in published:
            slot = int(witness.slots([request.key])[0])
            assert check_slot(witness, slot, request.key) == request.num_tokens
        witness.delete([one.key for one in published])


def check_nothing_is_lost(folder):
    with open_pool(Job(str(folder / "cxl0"), "", "last")) as last:
        assert last.stats().used_bytes == 0
        last.reserve("everything", NUM_BLOCKS * 64)
    assert inspect(str(folder / "cxl0")).problems == ()


@pytest.mark.slow
def test_kills_lose_nothing(crew, folder, request):
    kills = 200 if request.config.getoption("--long") else 15
    chosen = random.Random(kills)
    workers, kept = crew(4), {}
    with open_pool(Job(str(folder / "cxl0"), "", "keeper")) as keeper:
        for _ in range(kills):
            time.sleep(chosen.random() * 0.3)
            keep_some(keeper, folder, kept)
            workers.kill_one(chosen)
            for key, slot in kept.items():
                check_slot(keeper, slot, key)
        seen = workers.finish()
        assert kept
        assert sum(checked for _, checked, *_ in seen) > 0
        check_from_another_host(folder, kept)
        for key, slot in kept.items():  # deleted, and held here
            check_slot(keeper, slot, key)
    check_nothing_is_lost(folder)


@pytest.mark.slow
def test_a_process_that_sleeps_past_its_expiry_says_so_and_begins_again(crew, folder):
    chosen = random.Random(3)
    workers = crew(3)
    for _ in range(3):
        time.sleep(chosen.random() * 0.3)
        process, _ = workers.members[0]
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.3 * EXPIRY_S)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.3)
    seen = workers.finish()
    assert seen[0][2] >= 2, "it did not notice that it had slept"
    check_from_another_host(folder, {})
    check_nothing_is_lost(folder)


@pytest.mark.slow
def test_many_processes_for_a_long_time(crew, folder, request):
    workers = crew(8)
    time.sleep(300 if request.config.getoption("--long") else 15)
    for rounds, checked, _, early, late in workers.finish():
        assert rounds > 300
        assert checked > 50
        assert late[0] <= early[0], "open files grow"
        assert late[1] - early[1] < 24 << 20, "memory grows"
    check_from_another_host(folder, {})
    check_nothing_is_lost(folder)
