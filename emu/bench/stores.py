"""The same gather through the stores: local memory, a mapped device file, and RDMA READs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emu.bench.measure import Case, Group, Trial
from emu.errors import EmuError
from emu.layout import Component, KVLayout
from emu.registry import open_store, server_argv
from emu.server import running_server
from emu.store import Capability, StoreOptions

if TYPE_CHECKING:
    from contextlib import ExitStack

    from emu.bench.data_path import Workload
    from emu.store import KVStore, Rows

_CHUNK_TOKENS = 1024


def store_group(work: Workload, stack: ExitStack) -> Group:
    """Top-k rows of one layer by KVStore.gather, per medium; the stores live as long as the stack.

    A medium that this machine cannot open is named with the reason.
    """
    layout = KVLayout((Component("kv", work.row_bytes, (0,)),))
    rng = np.random.default_rng(work.seed)
    expected = rng.integers(0, 256, (work.context, work.row_bytes), np.uint8)
    cases: list[Case] = []
    skipped: list[tuple[str, str]] = []
    for scheme in ("dram", "cxl", "rdma"):
        try:
            store = stack.enter_context(_open(scheme, layout, work.memory_bytes, stack))
            slot = _fill(store, expected)
        except EmuError as error:
            skipped.append((scheme, str(error)))
            continue
        cases.append(_case(scheme, store, slot, expected, work, rng))
        if Capability.PACKED in store.capabilities:
            cases.append(_case(f"{scheme}, packed", store, slot, expected, work, rng))
    return Group(
        "store gather", "row", work.top_k, work.top_k * work.row_bytes, tuple(cases), tuple(skipped)
    )


def _open(scheme: str, layout: KVLayout, nbytes: int, stack: ExitStack) -> KVStore:
    options = StoreOptions(capacity_bytes=nbytes)
    if scheme == "dram":
        return open_store("dram://", layout, options)
    shared = Path("/dev/shm")
    directory = Path(
        stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="emu-bench-", dir=shared if shared.is_dir() else None
            )
        )
    )
    if scheme == "cxl":
        device = directory / "device"
        with device.open("wb") as file:
            file.truncate(nbytes)
        return open_store(f"cxl://{device}", layout, options)
    socket = directory / "node.sock"
    argv = server_argv("rdma", socket, nbytes, with_parent=True)
    stack.enter_context(running_server(argv, directory / "node.log", role="memory-node"))
    return open_store(f"rdma://{socket}", layout, options)


def _fill(store: KVStore, rows: Rows) -> int:
    """Write one request's rows and publish it; returns its slot."""
    context, row_bytes = rows.shape
    slot = store.reserve("bench", context).slot
    slots = np.array([slot], np.int64)
    chunk = store.buffer(min(context, _CHUNK_TOKENS) * row_bytes).reshape(1, -1, row_bytes)
    for first in range(0, context, _CHUNK_TOKENS):
        part = rows[first : first + _CHUNK_TOKENS]
        staged = chunk.reshape(-1)[: part.size].reshape(1, *part.shape)
        staged[0] = part
        store.append(slots, 0, np.array([first], np.int32), staged)
    store.publish("bench")
    return slot


def _case(
    name: str, store: KVStore, slot: int, expected: Rows, work: Workload, rng: np.random.Generator
) -> Case:
    slots = np.array([slot], np.int64)
    out = store.buffer(work.top_k * work.row_bytes).reshape(1, work.top_k, work.row_bytes)
    packed = name.endswith("packed")

    def prepare() -> Trial:
        tokens = rng.choice(work.context, work.top_k, replace=False).astype(np.int32)[None]
        return Trial(
            lambda: store.gather(slots, 0, tokens, out, packed=packed),
            lambda: np.array_equal(out[0], expected[tokens[0]]),
        )

    return Case(name, prepare)
