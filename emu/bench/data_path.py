"""The native data path against numpy and torch, on one mapped memory with the same random rows."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.bench.measure import Case, Group, Trial
from emu.layout import HEADER_BYTES, LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from emu.store import Rows, TokenIds

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """What a trial moves.

    Attributes:
        row_bytes: bytes of a KV row.
        top_k: rows gathered or written at once.
        context: tokens of the request that they come from.
        seed: of the rows' places and bytes.
    """

    row_bytes: int
    top_k: int
    context: int
    seed: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the request."""
        return -(-self.context // BLOCK_TOKENS)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the mapped device."""
        return HEADER_BYTES + self.num_blocks * BLOCK_TOKENS * self.row_bytes


class MappedPool:
    """One request in one region of a memory that is mapped as a device's is, its blocks in random order."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.rng = np.random.default_rng(workload.seed)
        fd = os.memfd_create("emu-bench")
        try:
            os.ftruncate(fd, workload.memory_bytes)
            self.memory = np.frombuffer(mmap.mmap(fd, workload.memory_bytes), np.uint8)
        finally:
            os.close(fd)
        self.memory[:] = self.rng.integers(0, 256, workload.memory_bytes, np.uint8)
        self.rows: Rows = self.memory[HEADER_BYTES:].reshape(-1, workload.row_bytes)
        self.blocks = self.rng.permutation(workload.num_blocks).astype(np.int32)
        self.tables = _native.RowTables(BLOCK_TOKENS, 1)
        self.slots = np.array(
            [self.tables.add(self.blocks, workload.context, 0, workload.context)], np.int64
        )

    def select(self) -> tuple[TokenIds, NDArray[np.int64]]:
        """Top-k different random tokens, int32 [1, k], and their row numbers, int64 [k]."""
        tokens = self.rng.choice(self.workload.context, self.workload.top_k, replace=False)
        numbers = self.blocks[tokens // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
        return tokens.astype(np.int32)[None], numbers + tokens % BLOCK_TOKENS


def gather_group(pool: MappedPool) -> Group:
    """Random rows into one array: the native core, the best calls of numpy and torch, and a contiguous copy."""
    import torch

    work = pool.workload
    torch.set_num_threads(1)
    out = np.zeros((work.top_k, work.row_bytes), np.uint8)
    torch_rows, torch_out = torch.from_numpy(pool.rows), torch.from_numpy(out)

    def native(tokens: TokenIds, numbers: NDArray[np.int64]) -> Callable[[], object]:
        return lambda: _native.gather_rows(
            pool.tables, pool.memory, 0, HEADER_BYTES, work.row_bytes, pool.slots, tokens, out
        )

    def numpy(tokens: TokenIds, numbers: NDArray[np.int64]) -> Callable[[], object]:
        return lambda: np.take(pool.rows, numbers, axis=0, out=out, mode="clip")

    def index_select(tokens: TokenIds, numbers: NDArray[np.int64]) -> Callable[[], object]:
        index = torch.from_numpy(numbers)
        return lambda: torch.index_select(torch_rows, 0, index, out=torch_out)

    def case(
        name: str, call: Callable[[TokenIds, NDArray[np.int64]], Callable[[], object]]
    ) -> Case:
        def prepare() -> Trial:
            tokens, numbers = pool.select()
            return Trial(call(tokens, numbers), lambda: np.array_equal(out, pool.rows[numbers]))

        return Case(name, prepare)

    def contiguous() -> Trial:
        first = int(pool.rng.integers(len(pool.rows) - work.top_k + 1))
        source = pool.rows[first : first + work.top_k]
        return Trial(lambda: np.copyto(out, source), lambda: np.array_equal(out, source))

    cases = (
        case("emu gather", native),
        case("numpy.take, clip", numpy),
        case("torch.index_select", index_select),
        Case("contiguous copy", contiguous),
    )
    return Group("gather", "row", work.top_k, out.nbytes, cases)


def scatter_group(pool: MappedPool) -> Group:
    """A run of tokens written by block table: through the caches, past them, and with write-back."""
    work = pool.workload
    rows = np.zeros((1, work.top_k, work.row_bytes), np.uint8)
    where = (pool.tables, pool.memory, 0, HEADER_BYTES, work.row_bytes, pool.slots)

    def case(name: str, *, nontemporal: bool = False, writeback: bool = False) -> Case:
        def prepare() -> Trial:
            rows[:] = pool.rng.integers(0, 256, rows.shape, np.uint8)
            first = int(pool.rng.integers(work.context - work.top_k + 1))
            tokens = np.arange(first, first + work.top_k)
            numbers = pool.blocks[tokens // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
            start = np.array([first], np.int32)

            def run() -> None:
                _native.scatter_rows(*where, start, rows, nontemporal)
                if writeback:
                    _native.writeback_rows(*where, start, work.top_k)

            return Trial(
                run, lambda: np.array_equal(pool.rows[numbers + tokens % BLOCK_TOKENS], rows[0])
            )

        return Case(name, prepare)

    cases = (
        case("emu scatter"),
        case("emu scatter, non-temporal", nontemporal=True),
        case("emu scatter, write back", writeback=True),
    )
    return Group("scatter", "row", work.top_k, rows.nbytes, cases)


def flush_group(pool: MappedPool, lines: int) -> Group:
    """What software coherence costs per line, against a plain copy of the same lines."""
    nbytes = lines * LINE_BYTES
    memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    source = np.zeros(nbytes, np.uint8)

    def case(
        name: str, run: Callable[[], object], *, copies: bool = False, clean: bool = False
    ) -> Case:
        def prepare() -> Trial:
            source[:] = pool.rng.integers(0, 256, nbytes, np.uint8)
            np.copyto(memory, ~source if copies else source)
            if clean:
                _native.writeback(memory, 0, nbytes)
                int(memory[::LINE_BYTES].sum())  # in the caches, and clean
            return Trial(run, lambda: np.array_equal(memory, source))

        return Case(name, prepare)

    cases = (
        case("plain copy", lambda: np.copyto(memory, source), copies=True),
        case("non-temporal copy", lambda: _native.nontemporal_copy(memory, source), copies=True),
        case("write back dirty lines", lambda: _native.writeback(memory, 0, nbytes)),
        case("invalidate clean lines", lambda: _native.invalidate(memory, 0, nbytes), clean=True),
    )
    return Group(f"flush of {lines} lines", "line", lines, nbytes, cases)
