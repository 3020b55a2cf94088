"""A shared memory as hosts without hardware coherence see it, with the history that tells who forgot what.

Every host has a private copy of each 64-byte line. Only its flushes and fences, or the adversary, move lines between
the copy and the memory. The adversary does what caches do: it evicts dirty lines (also half-written ones), fills lines
early, and finishes a flush, or a streamed word, at any time up to the next fence.

What a load should have seen follows from causality: who has read a store of another host must see what that host stored
before it. Nothing else is asked, so a reader may race with a writer as long as it does not `accept` what it got.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

LINE_BYTES = 64
WORD_BYTES = 8


@dataclass(frozen=True)
class Violation:
    """The first read that a right protocol would not have accepted.

    Attributes:
        kind: "stale", "torn", "two writers" (in one line), "stuck" or "error" (a host's function raised).
        hosts: numbers of the writer and the reader (or of the two writers; -1: none).
        address: of the first wrong byte.
        line: number of its 64-byte line.
        missing: the primitive or check whose absence explains it.
        seed: the schedule; `find_violation(..., seeds=[seed])` shows it again.
    """

    kind: str
    hosts: tuple[int, int]
    address: int
    line: int
    missing: str
    seed: int

    def __str__(self) -> str:
        """One line for a person."""
        where = f"at {self.address:#x} (line {self.line})"
        return f"{self.kind}: hosts {self.hosts} {where}, missing: {self.missing}; seed {self.seed}"


class Loaded(bytes):
    """Bytes as `Host.load` got them; `Host.accept` says whether they may be taken for right."""

    violation: tuple[str, Store, int, str] | None = None


@dataclass(eq=False)
class Store:
    """One store or stream of a host: bytes that belong together."""

    host: int
    number: int
    step: int
    address: int
    nbytes: int
    streamed: bool
    clock: dict[int, Store]  # what its host had seen of every host by then

    def lines(self) -> range:
        """The lines that it touches."""
        return _lines(self.address, self.nbytes)


@dataclass
class _Copy:
    data: bytearray
    writers: list[Store | None]  # per byte
    dirty: bool = False


@dataclass
class _History:
    """What a host has done, by step."""

    flushes: dict[int, list[int]] = field(default_factory=dict)  # line -> steps
    fences: list[int] = field(default_factory=list)
    learned: list[tuple[int, Store]] = field(default_factory=list)  # (step, a store that it saw)


class Medium:
    """The memory, and the adversary that moves lines.

    Args:
        nbytes: a multiple of 64.
        rng: the adversary's coins; it may also do nothing, or everything at once, for a whole schedule.
    """

    def __init__(self, nbytes: int, rng: random.Random) -> None:
        if nbytes <= 0 or nbytes % LINE_BYTES:
            raise ValueError(f"nbytes is {nbytes}: it must be a positive multiple of {LINE_BYTES}")
        self.nbytes = nbytes
        self.rng = rng
        self.busy = rng.choice([0.0, 0.1, 0.5, 0.9])
        self.step = 0
        self.lines = [
            _Copy(bytearray(LINE_BYTES), [None] * LINE_BYTES) for _ in range(nbytes // LINE_BYTES)
        ]
        self.hosts: list[Host] = []
        self.stores: list[Store] = []

    def meddle(self) -> None:
        """What caches do without being asked."""
        while self.rng.random() < self.busy:
            host = self.rng.choice(self.hosts)
            move = self.rng.randrange(4)
            if move == 0 and host._flushing:
                host._finish_flush(self.rng.randrange(len(host._flushing)))
            elif move == 1 and host._pieces:
                host._drain(self.rng.randrange(len(host._pieces)))
            elif host._recent:
                line = self.rng.choice(host._recent)
                if line not in host._copies:
                    host._fill(line)
                elif host._copies[line].dirty:
                    host._write_back(line)
                elif move == 2:
                    del host._copies[line]


class Host:
    """One host's view: what a protocol is written with. There is no read-modify-write.

    Attributes:
        number: 0, 1, ...
    """

    def __init__(self, medium: Medium, number: int, turn: Callable[[], None]) -> None:
        self.number = number
        self._medium = medium
        self._turn = turn
        self._copies: dict[int, _Copy] = {}
        self._flushing: list[int] = []
        self._pieces: list[tuple[int, bytes, Store]] = []
        self._recent: list[int] = []
        self._clock: dict[int, Store] = {}
        self._history = _History()
        medium.hosts.append(self)

    def load(self, address: int, nbytes: int) -> Loaded:
        """Bytes through the cache, line by line: another host may run between two lines."""
        self._check(address, nbytes)
        data, writers = bytearray(), list[Store | None]()
        for line in _lines(address, nbytes):
            self._step()
            copy = self._copy(line)
            part = _part(line, address, nbytes)
            data += copy.data[part]
            writers += copy.writers[part]
        before = dict(self._clock)
        for store in {store for store in writers if store}:
            self._learn(store)
        loaded = Loaded(data)
        loaded.violation = self._judge(address, writers, before)
        return loaded

    def accept(self, loaded: Loaded) -> bytes:
        """Take what a load returned for right: its bytes; the schedule ends here if they are not.

        Call it where the protocol hands a record out, after its own checks.
        """
        if loaded.violation:
            kind, store, address, missing = loaded.violation
            raise Caught(kind, (store.host, self.number), address, missing)
        return bytes(loaded)

    def store(self, address: int, data: bytes) -> None:
        """Into the cache, 8 bytes at a time: half of it may be evicted, and others run in between."""
        store = self._begin(address, data, streamed=False)
        for at, piece in _words(address, data):
            if at % 32 == 0 or at == address:
                self._step()
            copy = self._copy(at // LINE_BYTES)
            self._no_other_writer(at // LINE_BYTES)
            _put(copy, at, piece, store)
            copy.dirty = True

    def stream(self, address: int, data: bytes) -> None:
        """Past the cache (non-temporal): in memory by the next fence, in any order and in pieces."""
        store = self._begin(address, data, streamed=True)
        self._step()
        for line in store.lines():
            self._no_other_writer(line)
            self._drop(line)
        self._pieces += [(at, piece, store) for at, piece in _words(address, data)]

    def flush(self, address: int, nbytes: int) -> None:
        """Write dirty lines back and drop the copies; done by the next fence."""
        self._check(address, nbytes)
        self._step()
        for line in _lines(address, nbytes):
            self._flushing.append(line)
            self._history.flushes.setdefault(line, []).append(self._medium.step)

    def fence(self) -> None:
        """Flushes and streams before it are done before any load or store after it."""
        self._step()
        self._history.fences.append(self._medium.step)
        while self._flushing:
            self._finish_flush(0)
        while self._pieces:
            self._drain(0)

    def pause(self) -> None:
        """Let others run: for loops that wait."""
        self._step()

    def _step(self) -> None:
        self._turn()
        self._medium.step += 1
        self._medium.meddle()

    def _check(self, address: int, nbytes: int) -> None:
        if address < 0 or nbytes <= 0 or address + nbytes > self._medium.nbytes:
            raise IndexError(f"{nbytes} bytes at {address} of a memory of {self._medium.nbytes}")

    def _begin(self, address: int, data: bytes, *, streamed: bool) -> Store:
        self._check(address, len(data))
        medium = self._medium
        number = len(medium.stores) + 1
        store = Store(
            self.number, number, medium.step, address, len(data), streamed, dict(self._clock)
        )
        medium.stores.append(store)
        self._clock[self.number] = store
        return store

    def _copy(self, line: int) -> _Copy:
        if line not in self._copies:
            self._fill(line)
        if line not in self._recent:
            self._recent = [*self._recent[-15:], line]
        return self._copies[line]

    def _fill(self, line: int) -> None:
        source = self._medium.lines[line]
        self._copies[line] = _Copy(bytearray(source.data), list(source.writers))

    def _write_back(self, line: int) -> None:
        copy = self._copies[line]
        self._medium.lines[line] = _Copy(bytearray(copy.data), list(copy.writers))
        copy.dirty = False

    def _drop(self, line: int) -> None:
        if line in self._copies and self._copies[line].dirty:
            self._write_back(line)
        self._copies.pop(line, None)

    def _finish_flush(self, at: int) -> None:
        self._drop(self._flushing.pop(at))

    def _drain(self, at: int) -> None:
        address, piece, store = self._pieces.pop(at)
        _put(self._medium.lines[address // LINE_BYTES], address, piece, store)

    def _no_other_writer(self, line: int) -> None:
        for other in self._medium.hosts:
            if other is not self and line in other._copies and other._copies[line].dirty:
                raise Caught(
                    "two writers",
                    (other.number, self.number),
                    line * LINE_BYTES,
                    f"a line of its own for host {self.number}, or a flush and a fence by host "
                    f"{other.number} before it gives the line away",
                )

    def _learn(self, store: Store) -> None:
        """This host has seen a store, and so everything that its writer had seen or stored before."""
        for one in [*store.clock.values(), store]:
            known = self._clock.get(one.host)
            if known is None or known.number < one.number:
                self._clock[one.host] = one
                self._history.learned.append((self._medium.step, store))

    def _judge(
        self, address: int, writers: list[Store | None], before: dict[int, Store]
    ) -> tuple[str, Store, int, str] | None:
        """The first byte older than what this host knows of; or bytes of two stores in one load."""
        newest = max((one for one in writers if one), key=lambda one: one.number, default=None)
        for i, writer in enumerate(writers):
            number = writer.number if writer else 0
            due = self._due(address + i, number)
            if due:
                torn = newest is due and due.number > before.get(due.host, due).number
                return (
                    "torn" if torn else "stale",
                    due,
                    address + i,
                    self._missing(due, address + i),
                )
            covers = newest and newest.address <= address + i < newest.address + newest.nbytes
            if newest and covers and writer is not newest:
                return "torn", newest, address + i, self._missing(newest, address + i)
        return None

    def _due(self, at: int, number: int) -> Store | None:
        """The latest store to a byte that this host must see, if it is later than `number`."""
        for store in reversed(self._medium.stores[number:]):
            known = self._clock.get(store.host)
            inside = store.address <= at < store.address + store.nbytes
            if inside and known and store.number < known.number:
                return store
        return None

    def _missing(self, due: Store, address: int) -> str:
        """Which primitive is not between the store and the load, by both hosts' histories."""
        line = address // LINE_BYTES
        what = f"store at {due.address:#x}" if not due.streamed else f"stream at {due.address:#x}"
        now = self._medium.step
        known, published = next(
            ((step, one) for step, one in self._history.learned if _tells(one, due)), (now, due)
        )
        if due.host == self.number or published is due:
            return f"check by host {self.number} that the record was whole (sequence or checksum)"
        writer = self._medium.hosts[due.host]._history
        until = published.step
        flushed = next((s for s in writer.flushes.get(line, []) if due.step < s <= until), None)
        if not due.streamed and flushed is None:
            return f"flush by host {due.host} after {what}"
        since = due.step if due.streamed or flushed is None else flushed
        if not any(since < step <= until for step in writer.fences):
            return f"fence by host {due.host} after {'' if due.streamed else 'the flush of '}{what}"
        own = [step for step in self._history.flushes.get(line, []) if step > known]
        if not own:
            return f"flush by host {self.number} before load at {address:#x}"
        if not any(step > own[0] for step in self._history.fences):
            return f"fence by host {self.number} between flush and load at {address:#x}"
        return f"check by host {self.number} that the record was whole (sequence or checksum)"


class Caught(BaseException):
    """A violation, on its way out of a host's function; no handler for `Exception` stops it."""

    def __init__(self, kind: str, hosts: tuple[int, int], address: int, missing: str) -> None:
        super().__init__(missing)
        self.kind = kind
        self.hosts = hosts
        self.address = address
        self.missing = missing


def _tells(seen: Store, due: Store) -> bool:
    """Whether who saw a store knows of another that came before it."""
    known = seen if seen.host == due.host else seen.clock.get(due.host)
    return known is not None and known.number >= due.number


def _lines(address: int, nbytes: int) -> range:
    return range(address // LINE_BYTES, (address + nbytes - 1) // LINE_BYTES + 1)


def _part(line: int, address: int, nbytes: int) -> slice:
    """What of a line lies in a range."""
    begin = line * LINE_BYTES
    return slice(max(address - begin, 0), min(address + nbytes - begin, LINE_BYTES))


def _words(address: int, data: bytes) -> list[tuple[int, bytes]]:
    """The pieces of a store that are never torn: what of it lies in each aligned word."""
    pieces, at, end = [], address, address + len(data)
    while at < end:
        after = min(at - at % WORD_BYTES + WORD_BYTES, end)
        pieces.append((at, data[at - address : after - address]))
        at = after
    return pieces


def _put(copy: _Copy, address: int, piece: bytes, store: Store) -> None:
    at = address % LINE_BYTES
    copy.data[at : at + len(piece)] = piece
    copy.writers[at : at + len(piece)] = [store] * len(piece)
