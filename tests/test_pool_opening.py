"""Opening a device: what its first page and its directory say decides, and nothing foreign is overwritten."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contract_base import DEVICE_BYTES, LAYOUT, Place, child, publish_value, read, same, value

from emu import Component, KVLayout, StoreOptions
from emu.errors import LayoutMismatch, MediumError, StoreFull, UserError
from emu.pool.header import ForeignHeader, Header, parse_page
from emu.pool.opening import Action, Found, plan_opening

PAGE = Header(b"u" * 16, LAYOUT.fingerprint(), 16)
OTHER = replace(PAGE, layout=b"o" * 16)
ZERO = bytes(4096)
TORN = PAGE.to_page()[:40].ljust(4096, b"\0")


def plan(page, directory, formatted=True, pids=(), size_bytes=DEVICE_BYTES):
    found = Found(page, directory, formatted, pids)
    return plan_opening(found, LAYOUT, "cxl0", size_bytes)


@pytest.mark.parametrize(
    ("page", "directory", "formatted", "action"),
    [
        (ZERO, None, False, Action.FORMAT),
        (PAGE.to_page(), PAGE, True, Action.USE),
        (ZERO, PAGE, True, Action.FORMAT),  # the device was made anew
        (OTHER.to_page(), OTHER, True, Action.FORMAT),
        (ZERO, PAGE, False, Action.FINISH),
        (TORN, PAGE, False, Action.FINISH),
        (OTHER.to_page(), PAGE, False, Action.FINISH),
        (TORN, OTHER, False, Action.FORMAT),
    ],
)
def test_what_opening_does(page, directory, formatted, action):
    assert plan(page, directory, formatted) is action


@pytest.mark.parametrize("page", [PAGE, OTHER, replace(PAGE, uuid=b"v" * 16)])
@pytest.mark.parametrize("directory", [None, replace(PAGE, uuid=b"w" * 16)])
@pytest.mark.parametrize("pids", [(), (7,)])
def test_a_pool_without_its_directory_is_never_formatted(page, directory, pids):
    with pytest.raises(MediumError, match="directory is not beside it") as refused:
        plan(page.to_page(), directory, directory is not None, pids)
    assert refused.value.status == "DIRECTORY_ELSEWHERE"


def test_a_device_that_grew_keeps_its_geometry():
    assert plan(PAGE.to_page(), PAGE, size_bytes=2 * DEVICE_BYTES) is Action.USE


def test_a_device_that_was_cut_is_formatted_anew_only_when_nobody_holds_it():
    small = DEVICE_BYTES - LAYOUT.block_bytes
    assert plan(PAGE.to_page(), PAGE, size_bytes=small) is Action.FORMAT
    with pytest.raises(MediumError, match="cut while requests on it are held by process 7, 9"):
        plan(PAGE.to_page(), PAGE, pids=(7, 9), size_bytes=small)


def test_living_holders_keep_a_device():
    with pytest.raises(LayoutMismatch, match="process 7, 9") as mismatch:
        plan(OTHER.to_page(), OTHER, pids=(7, 9))
    assert (mismatch.value.found, mismatch.value.expected) == (
        OTHER.layout.hex(),
        LAYOUT.fingerprint().hex(),
    )
    for component in LAYOUT.components:
        assert f"{component.name} {component.row_bytes} B" in str(mismatch.value)
    with pytest.raises(MediumError, match="replaced"):
        plan(ZERO, PAGE, pids=(7,))


def test_a_holder_that_is_the_caller_is_not_told_to_stop_a_stranger():
    with pytest.raises(LayoutMismatch, match=rf"held by this process \({os.getpid()}\): close"):
        plan(OTHER.to_page(), OTHER, pids=(os.getpid(),))
    both = rf"this process \({os.getpid()}\) and process 7"
    with pytest.raises(MediumError, match=both):
        plan(ZERO, PAGE, pids=(7, os.getpid()))


@pytest.mark.parametrize("page", [TORN, b"\x7fELF".ljust(4096, b"\0"), ZERO[:-1] + b"x"])
@pytest.mark.parametrize("directory", [None, PAGE])
def test_foreign_pages_are_refused(page, directory):
    with pytest.raises(MediumError) as refused:
        plan(page, directory, formatted=directory is not None)
    assert refused.value.status == "FOREIGN_HEADER"
    assert "zero its first 4096 bytes" in refused.value.remedy


def test_a_device_too_small_for_a_block_says_so():
    with pytest.raises(UserError, match=str(LAYOUT.block_bytes)):
        plan(ZERO, None, size_bytes=4096 + LAYOUT.block_bytes - 1)


def test_every_changed_byte_of_a_page_is_noticed():
    page = PAGE.to_page()
    assert parse_page(page) == PAGE
    for position in (*range(64), 100, 4095):
        damaged = bytearray(page)
        damaged[position] ^= 1
        with pytest.raises(ForeignHeader):
            parse_page(bytes(damaged))


# -- on real devices ------------------------------------------------------------------------------------------
@pytest.fixture
def device(tmp_path):
    path = tmp_path / "cxl0"
    path.write_bytes(bytes(DEVICE_BYTES))
    return path


@pytest.fixture
def shm_device():
    folder = Path(tempfile.mkdtemp(prefix="emu-test-", dir="/dev/shm"))
    path = folder / "cxl0"
    path.write_bytes(bytes(DEVICE_BYTES))
    yield path
    shutil.rmtree(folder)


@pytest.fixture
def place(device):
    return Place(f"cxl://{device}", StoreOptions())


def test_content_outlives_every_store(place):
    with place.open() as store:
        descriptor, _ = publish_value(store, "a", "a", 100)
    with place.open() as store:
        assert same(read(store, store.attach(descriptor), 100), value("a", 100))


def test_foreign_data_is_not_overwritten(device, place):
    device.write_bytes(b"precious".ljust(DEVICE_BYTES, b"\0"))
    before = device.read_bytes()
    with pytest.raises(MediumError, match="70 72 65 63 69 6f 75 73"):
        place.open()
    assert device.read_bytes() == before


@pytest.mark.parametrize("torn", [0, 8, 20, 59])
def test_an_interrupted_format_is_finished_by_the_next(device, place, torn):
    place.open().close()
    with sqlite3.connect(f"{device}.directory") as db:
        db.execute("UPDATE device SET formatted = 0")
        (uuid,) = db.execute("SELECT uuid FROM device").fetchone()
    db.close()
    page = device.read_bytes()[:4096]
    with device.open("r+b") as file:
        file.write(page[:torn].ljust(4096, b"\0"))
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
        assert store.publish("a").device == uuid
    assert device.read_bytes()[:4096] == page


def test_a_device_made_anew_starts_empty(device, place):
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
    device.unlink()
    device.write_bytes(bytes(DEVICE_BYTES))
    with place.open() as store:
        assert not store.exists(["a"])[0]
        assert store.stats().used_bytes == 0


def test_a_device_replaced_under_a_holder_is_noticed_by_both(device, place):
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
        descriptor = store.publish("a")
        device.rename(f"{device}.old")
        for call in (lambda: store.attach(descriptor), lambda: store.reserve("b", 1)):
            with pytest.raises(MediumError, match="nothing stands there"):
                call()
        device.write_bytes(bytes(DEVICE_BYTES))
        with pytest.raises(MediumError, match="another file"):
            store.reserve("b", 1)
        with pytest.raises(MediumError, match=rf"held by this process \({os.getpid()}\)"):
            place.open()


def test_a_directory_removed_under_a_store_is_noticed(device, place):
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
        device.with_name("cxl0.directory").unlink()
        with pytest.raises(MediumError, match="removed or replaced"):
            store.exists(["a"])


@pytest.mark.parametrize("content", [b"not a database" * 100, b"x" * 5000])
def test_a_damaged_directory_is_refused_and_left_alone(device, place, content):
    directory = device.with_name("cxl0.directory")
    directory.write_bytes(content)
    with pytest.raises(MediumError, match="unusable"):
        place.open()
    assert directory.read_bytes() == content
    assert not any(device.read_bytes()[:4096])


def test_a_directory_of_another_version_is_refused(device, place):
    with sqlite3.connect(f"{device}.directory") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(MediumError, match="version 99"):
        place.open()


def test_a_directory_that_stays_locked_is_an_error(device, place, monkeypatch):
    monkeypatch.setattr("emu.pool.database.BUSY_TIMEOUT_S", 0.1)
    with place.open() as store:
        other = sqlite3.connect(f"{device}.directory", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(MediumError, match="keeps the directory locked") as locked:
            store.exists(["a"])
        assert locked.value.status.startswith("SQLITE_BUSY")
        other.execute("ROLLBACK")
        other.close()
        assert not store.exists(["a"])[0]


def test_a_truncated_device_is_an_error_not_a_signal(device, place):
    with place.open() as store:
        store.put(["a"], [value("a", 200)])
        slots = store.slots(["a"])
        os.truncate(device, 8192)
        out = np.zeros((1, 1, 656), np.uint8)
        tokens = np.zeros((1, 1), np.int32)
        for call in (
            lambda: store.gather(slots, 2, tokens, out),
            lambda: store.append(slots, 2, tokens[0], out),
            lambda: store.reserve("b", 1),
        ):
            with pytest.raises(MediumError, match=f"from {DEVICE_BYTES} to 8192 bytes"):
                call()


@pytest.mark.parametrize("cut_bytes", [0, 4096, 8192, DEVICE_BYTES - 4096])
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="holes are told on tmpfs")
def test_a_device_cut_and_grown_back_is_not_read_as_zeros(shm_device, cut_bytes):
    with Place(f"cxl://{shm_device}", StoreOptions()).open() as store:
        store.put(["a"], [value("a", 200)])
        slots = store.slots(["a"])
        os.truncate(shm_device, cut_bytes)
        os.truncate(shm_device, DEVICE_BYTES)
        refuse_everything(store, slots)


def refuse_everything(store, slots):
    out = np.zeros((1, 1, 656), np.uint8)
    tokens = np.zeros((1, 1), np.int32)
    for call in (
        lambda: store.gather(slots, 2, tokens, out),
        lambda: store.fetch(int(slots[0]), "kv", 0, np.zeros((3, 1, 656), np.uint8)),
        lambda: store.get(["a"], [value("b", 200)]),
        lambda: store.append(slots, 2, tokens[0], out),
        lambda: store.reserve("b", 1),
        lambda: store.put(["b"], [value("b", 1)]),
        lambda: store.publish("a"),
    ):
        with pytest.raises(MediumError) as refused:
            call()
        assert refused.value.status in {"DEVICE_TRUNCATED", "POOL_REPLACED"}


def test_a_header_overwritten_under_a_store_is_noticed(device, place):
    """Whatever the file system, and whoever did it."""
    with place.open() as store:
        store.put(["a"], [value("a", 200)])
        slots = store.slots(["a"])
        with device.open("r+b") as file:
            file.write(bytes(64))
        refuse_everything(store, slots)


def test_a_second_name_without_the_directory_is_refused(device, place):
    other = device.with_name("other")
    os.link(device, other)
    with place.open() as store:
        store.put(["a"], [value("a", 200)])
        with pytest.raises(MediumError) as refused:
            Place(f"cxl://{other}", StoreOptions()).open()
        assert refused.value.status == "DIRECTORY_ELSEWHERE"
        assert same(read(store, int(store.slots(["a"])[0]), 200), value("a", 200))


def test_a_symbolic_link_is_the_same_pool(device, place):
    other = device.with_name("other")
    other.symlink_to(device)
    with place.open() as store, Place(f"dram://{other}", StoreOptions()).open() as again:
        store.put(["a"], [value("a", 200)])
        again.put(["b"], [value("b", 200)])
        assert store.exists(["a", "b"]).tolist() == [True, True]
        assert same(read(store, int(store.slots(["a"])[0]), 200), value("a", 200))


def open_and_tell(pipe, place, layout):
    pipe.recv()
    with replace(place, layout=layout).open() as store:
        store.put([f"k{os.getpid()}"], [value("x", 4, layout)])
        pipe.send(store.publish(f"k{os.getpid()}").device)
        pipe.recv()


def test_processes_that_open_a_fresh_device_at_once_agree(place):
    with (
        child(open_and_tell, place, LAYOUT) as one,
        child(open_and_tell, place, LAYOUT) as two,
        child(open_and_tell, place, LAYOUT) as three,
    ):
        for process in (one, two, three):
            process.pipe.send("go")
        assert len({process.get() for process in (one, two, three)}) == 1
        with place.open() as store:
            assert store.stats().used_bytes == 3 * LAYOUT.block_bytes


def open_for_ever(pipe, place, layouts):
    pipe.send("started")
    while True:
        for layout in layouts:  # each finds the other's layout and formats the device anew
            replace(place, layout=layout).open().close()


@pytest.mark.slow
def test_kills_while_formatting_leave_a_device_that_opens(device, place):
    other = KVLayout((Component("kv", 1152, (0,)),))
    for round_ in range(6):
        with child(open_for_ever, place, (LAYOUT, other)) as opener:
            opener.get()
            time.sleep(0.01 + 0.017 * round_)
            assert opener.process.is_alive()
            opener.kill()
        with place.open() as store:
            store.put(["a"], [value("a", 200)])
            out = value("b", 200)
            assert store.get(["a"], [out])[0]
            assert same(out, value("a", 200))
            with pytest.raises(StoreFull):
                store.reserve("b", 13 * 64)
            store.delete(["a"])


def test_two_threads_on_one_store_are_told_so_and_no_file_is_blamed(place):
    with place.open() as store, store._directory._database.transaction():
        with pytest.raises(UserError, match="one store per thread") as refused:
            store.exists(["a"])
        assert "remove" not in str(refused.value)
