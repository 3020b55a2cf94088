"""Opening a device whose metadata is in its own memory: nothing foreign, older or damaged is overwritten."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contract_base import DEVICE_BYTES, LAYOUT, Place, child, publish_value, read, same, value

from emu import Component, KVLayout, StoreOptions
from emu.errors import KeyExists, LayoutMismatch, MediumError, StoreFull, UserError
from emu.pool.header import MAGIC, Header
from emu.pool.inspect import inspect
from emu.pool.shared_opening import Action, plan_opening

FRESH = Header.fresh(LAYOUT, DEVICE_BYTES)
PAGE = FRESH.to_page()
ZERO = bytes(4096)
TORN = PAGE[:40].ljust(4096, b"\0")


def changed(offset, code, number):
    """The page with another number in it and a checksum that fits."""
    body = bytearray(PAGE[:76])
    struct.pack_into(code, body, offset, number)
    return (bytes(body) + struct.pack("<I", zlib.crc32(body))).ljust(4096, b"\0")


def plan(page, size_bytes=DEVICE_BYTES):
    return plan_opening(page, LAYOUT, "cxl0", size_bytes)


def test_what_opening_does():
    assert plan(ZERO) is Action.FORMAT
    assert plan(PAGE) is Action.USE
    assert plan(PAGE, 2 * DEVICE_BYTES) is Action.USE
    assert plan(replace(FRESH, layout=b"o" * 16).to_page()) is Action.REPLACE


@pytest.mark.parametrize(
    ("page", "status", "words"),
    [
        (b"\x7fELF".ljust(4096, b"\0"), "FOREIGN_HEADER", "7f 45 4c 46"),
        (ZERO[:-1] + b"x", "FOREIGN_HEADER", "foreign"),
        (TORN, "FOREIGN_HEADER", "checksum"),
        (PAGE[:-1] + b"x", "FOREIGN_HEADER", "foreign data"),
        (changed(len(MAGIC), "<I", 1), "FOREIGN_HEADER", "version 1.* reads 2"),
        (changed(len(MAGIC), "<I", 3), "FOREIGN_HEADER", "version 3.* reads 2"),
        (Header(b"u" * 16, LAYOUT.fingerprint(), 16).to_page(), "FOREIGN_HEADER", "memory node"),
        (changed(64, "<I", 17), "METADATA_DAMAGED", "17 slots"),
        (changed(48, "<Q", 1 << 60), "METADATA_DAMAGED", "blocks"),
    ],
)
def test_pages_that_are_refused(page, status, words):
    with pytest.raises(MediumError, match=words) as refused:
        plan(page)
    assert refused.value.status == status
    assert "emu pool format" in refused.value.remedy or "memory node" in refused.value.remedy


def test_a_device_that_was_cut_is_refused():
    with pytest.raises(MediumError, match="it was cut") as cut:
        plan(PAGE, DEVICE_BYTES - 4096)
    assert cut.value.status == "DEVICE_TRUNCATED"


def test_a_device_too_small_for_a_block_says_so():
    with pytest.raises(UserError, match=str(LAYOUT.block_bytes)):
        plan(ZERO, 4096 + LAYOUT.block_bytes - 1)


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


def test_a_device_made_anew_starts_empty(device, place):
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
    device.unlink()
    device.write_bytes(bytes(DEVICE_BYTES))
    with place.open() as store:
        assert not store.exists(["a"])[0]
        assert store.stats().used_bytes == 0


def test_a_device_replaced_under_a_holder_is_noticed(device, place):
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
        with place.open() as other:  # the new file is a device of its own
            assert not other.exists(["a"])[0]


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


@pytest.mark.parametrize("name", [os.link, os.symlink])
def test_two_names_of_a_device_are_one_pool(device, place, name):
    other = device.with_name("other")
    name(device, other)
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


def test_a_device_formatted_anew_under_a_store_is_noticed(device, place):
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
        with device.open("r+b") as file:
            file.write(ZERO)
        with pytest.raises(MediumError, match="anew") as replaced:
            store.exists(["a"])
        assert replaced.value.status == "POOL_REPLACED"


def test_a_key_cannot_be_published_twice(place):
    with place.open() as one, place.open() as two:
        one.put(["a"], [value("a", 4)])
        with pytest.raises(KeyExists, match="'a'"):
            two.put(["a"], [value("b", 4)])
        assert two.exists(["a"])[0]
        out = value("b", 4)
        two.get(["a"], [out])
        assert same(out, value("a", 4))


def test_every_seventeenth_store_is_told_that_the_slots_are_taken(place):
    stores = [place.open() for _ in range(16)]
    with pytest.raises(MediumError, match="every slot") as taken:
        place.open()
    assert taken.value.status == "NO_SLOT"
    stores.pop().close()
    place.open().close()
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    "options",
    [
        {"pool_slots": (0, 17)},
        {"pool_slots": (3, 3)},
        {"pool_slots": (-1, 2)},
        {"expiry_s": 0.0},
        {"expiry_s": float("nan")},
    ],
)
def test_options_that_cannot_be_are_refused(place, options):
    with pytest.raises(UserError, match=next(iter(options))):
        replace(place, options=StoreOptions(**options)).open()


def test_two_machines_take_slots_of_their_own(place, device):
    for slots in ((0, 2), (2, 3)):
        options = StoreOptions(pool_slots=slots)
        stores = [replace(place, options=options).open() for _ in range(slots[1] - slots[0])]
        assert [one.slot for one in inspect(str(device)).alive] == list(range(*slots))
        with pytest.raises(MediumError, match="every slot"):
            replace(place, options=options).open()
        for store in stores:
            store.close()


def test_another_layout_does_not_replace_what_somebody_holds(place):
    other = KVLayout((Component("kv", 1152, (0,)),))
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
        with pytest.raises(LayoutMismatch, match=str(os.getpid())):
            replace(place, layout=other).open()
