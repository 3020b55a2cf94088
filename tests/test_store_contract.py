"""The store contract on the media that this process maps."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from contract import StoreContract
from contract_base import DATA_BYTES, DEVICE_BYTES, Place

from emu import StoreOptions


@pytest.fixture
def folder(tmp_path):
    """A folder on tmpfs where there is one: devices live there, and files on disks are slower."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="emu-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


class TestPrivateDram(StoreContract):
    @pytest.fixture
    def place(self):
        return Place("dram://", StoreOptions(capacity_bytes=DEVICE_BYTES))

    @pytest.fixture
    def raw(self):
        return lambda store: store._medium._memory[:DATA_BYTES].tobytes()

    def test_a_device_is_as_large_as_it_was_made(self, store):
        assert store._medium.size_bytes == DEVICE_BYTES


class TestSharedDram(StoreContract):
    @pytest.fixture
    def place(self, folder):
        return Place(f"dram://{folder}/dram0", StoreOptions(capacity_bytes=DEVICE_BYTES))

    @pytest.fixture
    def raw(self, folder):
        return lambda store: (folder / "dram0").read_bytes()[:DATA_BYTES]

    def test_a_device_is_as_large_as_it_was_made(self, store, folder):
        assert (folder / "dram0").stat().st_size == DEVICE_BYTES


class TestCxl(StoreContract):
    @pytest.fixture
    def place(self, folder):
        (folder / "cxl0").write_bytes(bytes(DEVICE_BYTES))
        return Place(f"cxl://{folder}/cxl0", StoreOptions())

    @pytest.fixture
    def raw(self, folder):
        return lambda store: (folder / "cxl0").read_bytes()[:DATA_BYTES]

    def test_a_device_is_as_large_as_it_was_made(self, store, folder):
        assert (folder / "cxl0").stat().st_size == store._medium.size_bytes == DEVICE_BYTES


class TestCxlWithoutCoherence(TestCxl):
    @pytest.fixture
    def place(self, folder):
        (folder / "cxl0").write_bytes(bytes(DEVICE_BYTES))
        return Place(f"cxl://{folder}/cxl0", StoreOptions(coherent=False))

    def test_lines_are_flushed_and_counted(self, store):
        from contract_base import tokens_of, value

        store.reset_stats()
        store.put(["a"], [value("a", 64)])
        stats = store.stats()
        written_lines = stats.bytes_written // 64
        assert stats.lines_flushed >= written_lines
        out = store.buffer(656).reshape(1, 1, 656)
        store.gather(store.slots(["a"]), 0, tokens_of([3]), out)
        assert store.stats().lines_flushed - stats.lines_flushed in (11, 12)  # 656 bytes, unaligned
