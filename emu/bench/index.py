"""The pool's index against Redis: batched lookups of chain hashes, and what incoherence and more hosts cost.

The hosts are participants of one pool in one process: what is timed is the code that hosts run, on this machine's
memory. Records are named blocks; a lookup answers with the block of a 16-byte chain hash.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from emu import _native
from emu.bench.measure import Case, Figure, Group, Trial, measure
from emu.bench.redis_server import get_request, redis_client, reply_value, why_not
from emu.host_memory import require_free
from emu.layout import HEADER_BYTES, MetadataLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from emu.bench.redis_server import RedisClient

BLOCK_TOKENS = 64
REQUEST_BLOCKS = 2048
"""Blocks of a request: 128K tokens."""

_RING_LINES = 1 << 15
_BYTES_PER_BLOCK = (
    48  # of a state: 44 while a request is reserved (emu/native/pool/operations.cc), and room
)
_EXPIRY_S = 3600.0
_HOSTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class IndexWork:
    """What is timed.

    Attributes:
        records: named blocks in the pool.
        batch: lookups in one call.
        rounds: turns.
        seed: of the hashes and of what is looked up.
    """

    records: int
    batch: int
    rounds: int
    seed: int


class IndexPool:
    """A pool of many named blocks and several hosts, in this process's memory."""

    def __init__(self, records: int, hosts: int, seed: int) -> None:
        self.hashes = np.random.default_rng(seed).integers(0, 256, (records, 16), np.uint8)
        self._snapshot_lines = records * _BYTES_PER_BLOCK // 48 + 4096
        slots = 2 * hosts
        nbytes = HEADER_BYTES + MetadataLayout(slots, _RING_LINES, self._snapshot_lines).nbytes
        require_free(nbytes + 400 * records, "the index", remedy="choose fewer --records")
        self._memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._slots = slots
        writer = self._join(coherent=True)
        self._publish(writer)
        self.coherent = [writer, *(self._join(coherent=True) for _ in range(hosts - 1))]
        self.blocks = np.empty(records, np.int32)
        self.coherent[-1].lookup(self.hashes, self.blocks)

    def _join(self, *, coherent: bool) -> _native.SharedPool:
        pool = _native.SharedPool(
            memory=self._memory,
            fd=-1,
            coherent=coherent,
            num_blocks=len(self.hashes),
            block_tokens=BLOCK_TOKENS,
            meta_offset=HEADER_BYTES,
            slots=self._slots,
            ring_lines=_RING_LINES,
            snapshot_lines=self._snapshot_lines,
            expiry_s=_EXPIRY_S,
            quarantine_s=10 * _EXPIRY_S,
        )
        pool.join(0, self._slots)
        return pool

    def _publish(self, writer: _native.SharedPool) -> None:
        names = [row.tobytes() for row in self.hashes]
        for first in range(0, len(names), REQUEST_BLOCKS):
            part = names[first : first + REQUEST_BLOCKS]
            tokens = len(part) * BLOCK_TOKENS
            (entry,) = writer.reserve([(f"request{first}", tokens, 0, len(part), part)])
            writer.publish([(entry[0], tokens)])

    @contextmanager
    def incoherent(self) -> Iterator[_native.SharedPool]:
        """One more host, which flushes and reloads what it reads."""
        pool = self._join(coherent=False)
        yield pool
        pool.leave()


class _Picker:
    """Fresh records for each trial."""

    def __init__(self, pool: IndexPool, batch: int, seed: int, *, walk: bool) -> None:
        self.pool, self.batch, self._walk = pool, min(batch, len(pool.hashes)), walk
        self._random = np.random.default_rng(seed)

    def pick(self) -> NDArray[np.int64]:
        records = len(self.pool.hashes)
        if self._walk:
            first = int(self._random.integers(0, records // self.batch)) * self.batch
            return np.arange(first, first + self.batch)
        return self._random.integers(0, records, self.batch)


def _pool_case(name: str, host: _native.SharedPool, picker: _Picker) -> Case:
    def prepare() -> Trial:
        which = picker.pick()
        hashes = np.ascontiguousarray(picker.pool.hashes[which])
        out = np.full(len(which), -2, np.int32)
        right = picker.pool.blocks[which]
        return Trial(lambda: host.lookup(hashes, out), lambda: bool((out == right).all()))

    return Case(name, prepare)


def _walk_case(name: str, host: _native.SharedPool, picker: _Picker) -> Case:
    def prepare() -> Trial:
        hashes = np.ascontiguousarray(picker.pool.hashes[picker.pick()])
        found: list[int] = []
        return Trial(
            lambda: found.append(host.longest_prefix(hashes)), lambda: found == [len(hashes)]
        )

    return Case(name, prepare)


def _redis_case(name: str, client: RedisClient, picker: _Picker) -> Case:
    def prepare() -> Trial:
        which = picker.pick()
        request = get_request([picker.pool.hashes[i].tobytes() for i in which])
        found: list[bytes] = []

        def right() -> bool:
            numbers = [
                int.from_bytes(reply_value(found[0], i), "little") for i in range(len(which))
            ]
            return bool(numbers == picker.pool.blocks[which].tolist())

        return Trial(lambda: found.append(client.get_many(request, len(which))), right)

    return Case(name, prepare)


def run_index(work: IndexWork, *, vs_redis: bool) -> dict[str, Any]:
    """Measure; the JSON result.

    Raises:
        HostError: it needs more memory than is free.
        EmuError: a lookup gave a wrong answer.
    """
    pool = IndexPool(work.records, 2, work.seed)
    skipped = why_not() if vs_redis else "not asked for: --vs redis"
    with pool.incoherent() as incoherent:
        if skipped:
            lookups, walks = _two_groups(work, pool, incoherent, None)
        else:
            with redis_client() as client:
                values = [int(block).to_bytes(8, "little") for block in pool.blocks]
                client.fill([row.tobytes() for row in pool.hashes], values)
                lookups, walks = _two_groups(work, pool, incoherent, client)
    redis = lookups.get("redis")
    return {
        "clock": "host",
        "records": work.records,
        "hosts": 2,
        "batch": work.batch,
        "rounds": work.rounds,
        "seed": work.seed,
        "speedup_vs_redis": None if redis is None else redis.ratio_p50,
        "redis_skipped": skipped,
        "lookup": _times(lookups, work.batch),
        "prefix_walk": {"blocks": min(REQUEST_BLOCKS, work.records)}
        | _times(walks, REQUEST_BLOCKS),
        "by_hosts": [_with_hosts(work, hosts) for hosts in _HOSTS],
    }


def _two_groups(
    work: IndexWork, pool: IndexPool, incoherent: _native.SharedPool, client: RedisClient | None
) -> tuple[dict[str, Figure], dict[str, Figure]]:
    figures = []
    for walk in (False, True):
        picker = _Picker(pool, REQUEST_BLOCKS if walk else work.batch, work.seed, walk=walk)
        make = _walk_case if walk else _pool_case
        cases = [
            make("coherent", pool.coherent[-1], picker),
            make("incoherent", incoherent, picker),
        ]
        if client is not None:
            cases.append(_redis_case("redis", client, picker))
        group = Group("index", "lookup", picker.batch, 0, tuple(cases))
        figures.append({one.name: one for one in measure(group, work.rounds)})
    return figures[0], figures[1]


def _with_hosts(work: IndexWork, hosts: int) -> dict[str, Any]:
    """What one lookup, and one batch, take in a pool that so many hosts have open."""
    pool = IndexPool(min(work.records, 1 << 16), hosts, work.seed)
    result: dict[str, Any] = {"hosts": hosts}
    with pool.incoherent() as incoherent:
        for batch in (1, work.batch):
            picker = _Picker(pool, batch, work.seed, walk=False)
            cases = (
                _pool_case("coherent", pool.coherent[-1], picker),
                _pool_case("incoherent", incoherent, picker),
            )
            for one in measure(Group("index", "lookup", batch, 0, cases), work.rounds):
                result[f"{one.name}_batch{batch}_ns"] = one.median_ns
    return result


def _times(figures: dict[str, Figure], items: int) -> dict[str, Any]:
    return {
        name: {
            "median_ns": one.median_ns,
            "ns_per_lookup": one.median_ns / items,
            "ratio": {"p15": one.ratio_p15, "p50": one.ratio_p50, "p85": one.ratio_p85},
        }
        for name, one in figures.items()
    }
