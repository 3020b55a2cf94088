"""A pool used by a host that shares the device but not the directory: descriptors alone, byte-exact, refusals."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import emu
from emu.errors import LayoutMismatch, MediumError, SlotStale, StaleDescriptor, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYOUT = emu.KVLayout((emu.Component("kv", 1152, (0, 1)), emu.Component("index", 132, (1,))))
PROMPT, APPEND = 150, 70


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "cxl0"
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, 4 << 20)
    return path


@pytest.fixture
def owner(device: Path) -> Iterator[emu.KVStore]:
    with emu.open_store(f"cxl://{device}", LAYOUT) as store:
        yield store


def borrow(device: Path, layout: emu.KVLayout = LAYOUT) -> emu.KVStore:
    """As on another host: nothing is at the directory's place beside its view of the device."""
    other = device.with_name("dax0.0")
    if not other.exists():
        other.hardlink_to(device)
    return emu.open_store(f"cxl://{other}", layout, emu.StoreOptions(borrow=True))


def rows(component: emu.Component, tokens: int, seed: int) -> np.ndarray:
    shape = (len(component.layers), tokens, component.row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def prefill(owner: emu.KVStore, key: str = "r", seed: int = 1) -> emu.Descriptor:
    slot = owner.reserve(key, PROMPT, append_tokens=APPEND).slot
    for component in LAYOUT.components:
        write(owner, slot, component, rows(component, PROMPT, seed), 0)
    return owner.publish(key)


def write(
    store: emu.KVStore, slot: int, component: emu.Component, data: np.ndarray, start: int
) -> None:
    for index, layer in enumerate(component.layers):
        part = np.ascontiguousarray(data[index : index + 1])
        starts = np.array([start], np.int32)
        store.append(np.array([slot]), layer, starts, part, component=component.name)


def test_what_the_owner_wrote_is_read_and_what_is_appended_goes_back(
    device: Path, owner: emu.KVStore
) -> None:
    descriptor = emu.Descriptor.from_bytes(prefill(owner).to_bytes())
    with borrow(device) as store:
        slot = store.attach(descriptor)
        assert store.length(slot) == PROMPT
        for component in LAYOUT.components:
            found = np.empty_like(rows(component, PROMPT, 1))
            store.fetch(slot, component.name, 0, found)
            assert np.array_equal(found, rows(component, PROMPT, 1))
            write(store, slot, component, rows(component, APPEND, 2), PROMPT)
        grown = emu.Descriptor.from_bytes(store.publish("r").to_bytes())
        assert grown == replace(descriptor, num_tokens=PROMPT + APPEND)
        store.detach(slot)
        with pytest.raises(SlotStale):
            store.length(slot)
    assert not device.with_name("dax0.0.directory").exists()
    slot = owner.attach(grown)
    assert owner.length(slot) == PROMPT + APPEND
    for component in LAYOUT.components:
        found = np.empty_like(rows(component, APPEND, 2))
        owner.fetch(slot, component.name, PROMPT, found)
        assert np.array_equal(found, rows(component, APPEND, 2))


def test_only_the_reserved_room_can_be_appended_to(device: Path, owner: emu.KVStore) -> None:
    descriptor = prefill(owner)
    room = PROMPT + 2 * LAYOUT.block_tokens  # 70 tokens reserve two blocks
    with borrow(device) as store:
        slot = store.attach(descriptor)
        component = LAYOUT.components[0]
        with pytest.raises(ValueError, match="reserved"):
            write(store, slot, component, rows(component, 2 * LAYOUT.block_tokens + 1, 3), PROMPT)
    for wrong in (replace(descriptor, num_tokens=room + 1),):
        with pytest.raises(StaleDescriptor):
            owner.attach(wrong)
        with borrow(device) as store, pytest.raises(StaleDescriptor):
            store.attach(wrong)


def test_what_only_the_owner_can_do_is_refused(device: Path, owner: emu.KVStore) -> None:
    prefill(owner)
    with borrow(device) as store:
        for act in (
            lambda: store.reserve("new", 10),
            lambda: store.delete(["r"]),
            lambda: store.put(["new"], [{c.name: rows(c, 3, 1) for c in LAYOUT.components}]),
        ):
            with pytest.raises(UserError, match="directory is on another host"):
                act()
        assert not store.exists(["r"]).any(), "unknown until its descriptor comes"
    assert owner.exists(["r"]).all()


def test_one_slot_at_a_time_may_append(device: Path, owner: emu.KVStore) -> None:
    descriptor = prefill(owner)
    component = LAYOUT.components[0]
    with borrow(device) as store:
        first, second = store.attach(descriptor), store.attach(descriptor)
        write(store, first, component, rows(component, 1, 1), PROMPT)
        with pytest.raises(UserError, match="another attacher appends"):
            write(store, second, component, rows(component, 1, 1), PROMPT)
        store.detach(first)
        write(store, second, component, rows(component, 1, 1), PROMPT)


def test_a_foreign_or_stale_pool_is_refused(device: Path, owner: emu.KVStore) -> None:
    descriptor = prefill(owner)
    other_layout = emu.KVLayout((emu.Component("kv", 656, (0,)),))
    with pytest.raises(LayoutMismatch):
        borrow(device, other_layout)
    store = borrow(device)
    with pytest.raises(StaleDescriptor):
        store.attach(replace(descriptor, device=bytes(16)))
    with pytest.raises(StaleDescriptor):
        store.attach(replace(descriptor, blocks=(*descriptor.blocks[:-1], 1 << 20)))
    owner.close()
    with device.open("r+b") as file:
        file.write(bytes(4096))
    with pytest.raises(MediumError, match="never formatted") as caught:
        store.attach(descriptor)
    assert caught.value.status == "NO_POOL"
    with pytest.raises(MediumError, match="open the device on its owner first"):
        borrow(device)
    emu.open_store(f"cxl://{device}", LAYOUT).close()
    with pytest.raises(MediumError, match="formatted the device anew"):
        store.attach(descriptor)
    store.close()
