"""Who counts as dead: only whom the kernel says is gone, whatever namespace asks."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from contract_base import DEVICE_BYTES, LAYOUT, NUM_BLOCKS, Place, child, read, same, value

from emu import StoreOptions
from emu.errors import EmuError, StoreFull

OTHER_CLOCK = ["unshare", "--user", "--map-root-user", "--time", "--boottime", "100000"]
# Holds one block, then takes all that it can get, and says how much.
CROWD_OUT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from contract_base import NUM_BLOCKS, Place, value
from emu import StoreOptions
from emu.errors import EmuError
store = Place({url!r}, StoreOptions()).open()
kept = 0
try:
    for kept in range(NUM_BLOCKS + 1):
        store.put([f"mine{{kept}}"], [value("mine", 64)])
except EmuError:
    pass
print(kept, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path):
    device = tmp_path / "cxl0"
    device.write_bytes(bytes(DEVICE_BYTES))
    return Place(f"cxl://{device}", StoreOptions())


def crowd_out(place, prefix):
    code = CROWD_OUT.format(paths=sys.path, url=place.url)
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def keeps_what_it_holds(place, prefix):
    """Both sides: neither takes the other for dead."""
    with place.open() as store:
        store.put(["a"], [value("a", 200)])
        slot = int(store.slots(["a"])[0])
        with crowd_out(place, prefix) as other:
            assert other.stdout is not None
            assert int(other.stdout.readline()) == NUM_BLOCKS - 4
            assert store.stats().used_bytes == NUM_BLOCKS * LAYOUT.block_bytes
            assert same(read(store, slot, 200), value("a", 200))
            other.communicate()


def test_a_process_of_another_time_namespace_is_no_stranger(place):
    probe = subprocess.run([*OTHER_CLOCK, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no time namespace can be made here: {probe.stderr.strip()}")
    keeps_what_it_holds(place, OTHER_CLOCK)


def open_short_of_descriptors(pipe, place):
    """Opens a store with every number of free descriptors from none to enough, and holds a block in each."""
    stores = []
    for free in range(12):
        highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + free, hard))
        try:
            store = place.open()
        except (EmuError, OSError):
            continue
        store.put([f"mine{len(stores)}"], [value("mine", 64)])
        stores.append(store)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pipe.send(len(stores))
    pipe.recv()


def test_a_process_that_could_not_look_itself_up_is_no_corpse(place):
    with child(open_short_of_descriptors, place) as other:
        held = other.get()
        assert held > 0
        with place.open() as store:
            with pytest.raises(StoreFull):
                store.reserve("all", (NUM_BLOCKS - held + 1) * LAYOUT.block_tokens)
            store.reserve("rest", (NUM_BLOCKS - held) * LAYOUT.block_tokens)
