"""A memory node's directory, a file beside its socket: what it and the first page say decides."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from contract_base import DEVICE_BYTES, LAYOUT, Place, value
from memory_nodes import raw_node

from emu import StoreOptions
from emu.errors import LayoutMismatch, MediumError, UserError
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


# -- on a node --------------------------------------------------------------------------------------------------
@pytest.fixture
def node(tmp_path):
    with raw_node(tmp_path, DEVICE_BYTES) as node:
        yield node


@pytest.fixture
def place(node):
    return Place(f"rdma://{node.address}", StoreOptions())


@pytest.fixture
def directory(node):
    return Path(f"{node.address}.directory")


@pytest.mark.parametrize("torn", [0, 8, 20, 59])
def test_an_interrupted_format_is_finished_by_the_next(node, place, directory, torn):
    place.open().close()
    with sqlite3.connect(directory) as db:
        db.execute("UPDATE device SET formatted = 0")
        (uuid,) = db.execute("SELECT uuid FROM device").fetchone()
    db.close()
    page = node.raw[:4096].tobytes()
    node.raw[torn:4096] = 0
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
        assert store.publish("a").device == uuid
    assert node.raw[:4096].tobytes() == page


def test_a_directory_removed_under_a_store_is_noticed(node, place, directory):
    with place.open() as store:
        store.put(["a"], [value("a", 4)])
        directory.unlink()
        with pytest.raises(MediumError, match="removed or replaced"):
            store.exists(["a"])


@pytest.mark.parametrize("content", [b"not a database" * 100, b"x" * 5000])
def test_a_damaged_directory_is_refused_and_left_alone(node, place, directory, content):
    directory.write_bytes(content)
    with pytest.raises(MediumError, match="unusable"):
        place.open()
    assert directory.read_bytes() == content
    assert not node.raw[:4096].any()


def test_a_directory_of_another_version_is_refused(node, place, directory):
    with sqlite3.connect(directory) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(MediumError, match="version 99"):
        place.open()


def test_a_directory_that_stays_locked_is_an_error(node, place, directory, monkeypatch):
    monkeypatch.setattr("emu.pool.database.BUSY_TIMEOUT_S", 0.1)
    with place.open() as store:
        other = sqlite3.connect(directory, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(MediumError, match="keeps the directory locked") as locked:
            store.exists(["a"])
        assert locked.value.status.startswith("SQLITE_BUSY")
        other.execute("ROLLBACK")
        other.close()
        assert not store.exists(["a"])[0]


def test_two_threads_on_one_store_are_told_so_and_no_file_is_blamed(place):
    with place.open() as store, store._directory._database.transaction():
        with pytest.raises(UserError, match="one store per thread") as refused:
            store.exists(["a"])
        assert "remove" not in str(refused.value)
