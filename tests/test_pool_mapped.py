"""Mapped media: what is refused before anything is touched, sizes, NUMA facts."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from contract_base import DEVICE_BYTES, LAYOUT, value

from backends import dram
from emu import StoreOptions, host_memory, open_store
from emu.devdax import devdax_bytes
from emu.errors import HostError, MediumError, UserError
from emu.numa import NumaWarning


def open_at(url, **options):
    return open_store(url, LAYOUT, StoreOptions(**options))


@pytest.mark.parametrize("capacity", [0, -1, 4096, LAYOUT.block_bytes])
def test_private_dram_needs_a_capacity_that_holds_a_block(capacity):
    with pytest.raises(UserError, match="capacity"):
        open_at("dram://", capacity_bytes=capacity)


def test_private_dram_that_does_not_fit_is_refused_with_numbers():
    with pytest.raises(HostError, match=r"needs .* TiB, but only .* of memory are free"):
        open_at("dram://", capacity_bytes=1 << 50)


def test_a_shared_file_that_does_not_fit_is_refused_and_not_left_behind(tmp_path):
    with pytest.raises(HostError, match=r"available|free"):
        open_at(f"dram://{tmp_path}/big", capacity_bytes=1 << 50)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "theirs").touch()
    with pytest.raises(HostError):
        open_at(f"dram://{tmp_path}/theirs", capacity_bytes=1 << 50)
    assert (tmp_path / "theirs").exists()


def test_a_shared_file_is_made_allocated_and_then_used_as_it_is(tmp_path):
    path = tmp_path / "dram0"
    with open_at(f"dram://{path}", capacity_bytes=DEVICE_BYTES - 1) as store:
        assert store.stats().capacity_bytes == 16 * LAYOUT.block_bytes
        status = path.stat()
        assert status.st_size == DEVICE_BYTES
        assert status.st_blocks * 512 >= DEVICE_BYTES
        store.put(["a"], [value("a", 1)])
    with open_at(f"dram://{path}") as store:
        assert store.exists(["a"])[0]
    with open_at(f"dram://{path}", capacity_bytes=DEVICE_BYTES) as store:
        assert store.exists(["a"])[0]
    with pytest.raises(UserError, match=f"{DEVICE_BYTES} bytes, {2 * DEVICE_BYTES} asked"):
        open_at(f"dram://{path}", capacity_bytes=2 * DEVICE_BYTES)
    assert path.stat().st_size == DEVICE_BYTES


@pytest.mark.parametrize("scheme", ["cxl", "dram"])
def test_what_is_no_device_is_refused(tmp_path, scheme):
    (tmp_path / "odd").write_bytes(bytes(5000))
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    names = [tmp_path / "missing", tmp_path / "odd", tmp_path / "empty", tmp_path / "odd/x"]
    for path in [*names, tmp_path / "folder", "/dev/null"]:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(UserError, match=str(path)):
            open_at(f"{scheme}://{path}")
        assert sorted(tmp_path.iterdir()) == before


def test_cxl_needs_a_path():
    with pytest.raises(UserError, match="names no device"):
        open_at("cxl://")


def test_a_sparse_device_gets_its_memory_first(tmp_path):
    path = tmp_path / "cxl0"
    path.touch()
    os.truncate(path, DEVICE_BYTES)
    open_at(f"cxl://{path}").close()
    assert path.stat().st_blocks * 512 >= DEVICE_BYTES


def test_a_sparse_device_that_cannot_be_filled_is_refused(tmp_path):
    path = tmp_path / "cxl0"
    path.touch()
    os.truncate(path, 1 << 43)
    with pytest.raises(HostError, match=f"{1 << 43} bytes do not fit"):
        open_at(f"cxl://{path}")
    assert path.stat().st_blocks * 512 < 1 << 20


def test_the_size_of_a_devdax_device_comes_from_sysfs(tmp_path):
    status = Path("/dev/null").stat()
    sysfs = tmp_path / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    sysfs.mkdir()
    (tmp_path / "bus" / "dax").mkdir(parents=True)
    (tmp_path / "bus" / "mem").mkdir()
    (sysfs / "subsystem").symlink_to("../bus/dax")
    (sysfs / "size").write_text("262144000\n")
    assert devdax_bytes(status, tmp_path) == 262144000
    (sysfs / "size").write_text("banana\n")
    with pytest.raises(ValueError, match="banana"):
        devdax_bytes(status, tmp_path)
    (sysfs / "subsystem").unlink()
    (sysfs / "subsystem").symlink_to("../bus/mem")
    assert devdax_bytes(status, tmp_path) is None


def test_a_character_device_that_is_not_devdax_is_refused():
    with pytest.raises(UserError, match="not devdax"):
        open_at("cxl:///dev/null")


@pytest.mark.parametrize("on_disk", [False, True])
def test_only_a_file_in_memory_is_held_against_free_memory(tmp_path, monkeypatch, on_disk):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4096)
    monkeypatch.setattr(dram, "occupies_memory", lambda path: not on_disk)
    path, options = tmp_path / "shared", StoreOptions(capacity_bytes=DEVICE_BYTES)
    if on_disk:
        open_store(f"dram://{path}", LAYOUT, options).close()
        assert path.stat().st_size == DEVICE_BYTES
    else:
        with pytest.raises(HostError, match="only 4 KiB of memory are free"):
            open_store(f"dram://{path}", LAYOUT, options)
        assert not path.exists()


def test_the_directory_of_a_link_is_the_devices(tmp_path):
    device = tmp_path / "cxl0"
    device.write_bytes(bytes(DEVICE_BYTES))
    (tmp_path / "link").symlink_to(device)
    with open_at(f"cxl://{device}") as one, open_at(f"cxl://{tmp_path}/link") as two:
        one.put(["a"], [value("a", 1)])
        assert two.exists(["a"])[0]
    assert not (tmp_path / "link.directory").exists()


def test_a_node_that_is_not_there_is_said_and_the_store_works():
    with pytest.warns(NumaWarning, match="999"):
        store = open_at("dram://", capacity_bytes=DEVICE_BYTES, numa_node=999)
    with store:
        stats = store.stats()
        assert (stats.numa_node, stats.numa_bound) == (999, False)
        assert stats.numa_reason
        store.put(["a"], [value("a", 1)])


def test_a_node_that_is_there_is_bound_or_the_reason_is_said(tmp_path):
    for url, options in (
        ("dram://", {"capacity_bytes": DEVICE_BYTES}),
        (f"dram://{tmp_path}/dram0", {"capacity_bytes": DEVICE_BYTES}),
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            store = open_at(url, numa_node=0, **options)
        with store:
            stats = store.stats()
            assert stats.numa_node == 0
            assert stats.numa_bound != bool(stats.numa_reason)
            assert len(warned) == (0 if stats.numa_bound else 1)


def test_a_view_that_outlives_its_store_can_still_be_read(tmp_path):
    store = open_at(f"dram://{tmp_path}/dram0", capacity_bytes=DEVICE_BYTES)
    view = store._medium._memory[:8]
    store.close()
    assert view.tobytes() == b"EMUPOOL1"


def test_closing_leaves_no_mapping_and_no_open_file(tmp_path):
    path = tmp_path / "cxl0"
    path.write_bytes(bytes(DEVICE_BYTES))
    with open_at(f"cxl://{path}"):
        assert traces(path) == {"fd", "maps"}
    assert traces(path) == set()
    path.write_bytes(b"foreign".ljust(DEVICE_BYTES, b"\0"))
    with pytest.raises(MediumError):
        open_at(f"cxl://{path}")
    assert traces(path) == set()


def traces(path):
    """Where this process has the device or a file beside it."""
    files = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    found = {"fd"} if any(name.startswith(str(path)) for name in files) else set()
    return found | ({"maps"} if str(path) in Path("/proc/self/maps").read_text() else set())
