"""Clocks: programs of actors, resumed in the order of model time; each operation they submit gets its times.

An actor is a generator. What it yields is what it waits for: an `Op`, a list of `Op`s, a `Signal`, or a model time
in nanoseconds. Operations are submitted at the actor's own time; a transfer reserves its links there and then, so
links are first in, first out by model time.
"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from emu.errors import DeadlockError, UserError
from emu.timing.oplog import NO_PATH, OpLog
from emu.timing.pace import HostPace

if TYPE_CHECKING:
    from emu.timing.system import Path, System

_JOIN_ABOVE = 16  # dependencies after which one "join" operation stands for them all


class Op:
    """An operation in flight or done.

    Attributes:
        id: its place in the log.
        start_ns: when it was submitted.
        end_ns: when it ends; in paced mode an estimate until someone has waited for it.
    """

    __slots__ = ("_due_ns", "_epoch", "end_ns", "id", "start_ns")

    def __init__(self, number: int, start_ns: int, end_ns: int, due_ns: int, epoch: int) -> None:
        self.id = number
        self.start_ns = start_ns
        self.end_ns = end_ns
        self._due_ns = due_ns
        self._epoch = epoch

    def __repr__(self) -> str:
        return f"Op(id={self.id}, start_ns={self.start_ns}, end_ns={self.end_ns})"


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link did during a run.

    Attributes:
        busy_ns: model time that it was occupied.
        nbytes: what crossed it.
        utilisation: busy_ns over the run's time, 0 where no time passed.
    """

    busy_ns: int
    nbytes: int
    utilisation: float


class _Actor:
    """One program and where it stands: its time is the latest end of `after`, or `not_before_ns`."""

    __slots__ = ("after", "epoch", "name", "not_before_ns", "now_ns", "program", "waits_for")

    def __init__(self, name: str, program: Program | None) -> None:
        self.name = name
        self.program = program
        self.now_ns = 0
        self.after: tuple[int, ...] = ()
        self.not_before_ns = 0
        self.epoch = 0
        self.waits_for: list[Op] = []


class Signal:
    """Lets actors wait for another one: `yield signal` until somebody calls fire(). It stays fired.

    Attributes:
        name: for messages.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self._clock = clock
        self._fired_by: _Actor | None = None
        self._waiting: list[_Actor] = []

    @property
    def fired(self) -> bool:
        """Whether fire() was called."""
        return self._fired_by is not None

    def fire(self) -> None:
        """Resume everyone who waits, at the caller's time; firing again changes nothing."""
        if self._fired_by is None:
            self._clock._fire(self)


Wait: TypeAlias = "Op | list[Op] | Signal | int"
Program: TypeAlias = Generator[Wait, None, None]


class Clock(ABC):
    """Runs actors and gives their operations times.

    Attributes:
        mode: "off", "virtual" or "paced".
        dilation: host time per model time where the clock paces, else None.
        system: what is modelled.
        log: every operation so far.
    """

    mode: str

    def __init__(self, system: System) -> None:
        self.system = system
        self.dilation: float | None = None
        self.log = OpLog()
        self._engine = system.engine()
        self._known_paths = 0
        self._actor_numbers: dict[str, int] = {}
        self._outside = _Actor("outside", None)
        self._running = self._outside
        self._queue: list[tuple[int, int, _Actor]] = []
        self._pushes = 0
        self._epochs = 0
        self._parked: dict[_Actor, Signal] = {}

    # -- what a mode decides ------------------------------------------------------------------------------
    @property
    @abstractmethod
    def now_ns(self) -> int:
        """Time of the running actor; outside run(), of the last one that ran."""

    @abstractmethod
    def _compute_due(self, actor: int, duration_ns: int) -> int:
        """When a compute submitted now is through, model ns."""

    @abstractmethod
    def _transfer_due(self, path: Path, nbytes: int, requests: int) -> int:
        """When a transfer submitted now is through, model ns."""

    def _reported_end(self, due_ns: int) -> int:
        return due_ns

    def _rank(self, actor: _Actor) -> int:
        """Actors resume in this order; those of one rank in the order in which their waits ended."""
        return actor.now_ns

    def _pass_time(self, actor: _Actor) -> None:
        """Let the host reach the actor's time, before it resumes."""

    # -- figures ------------------------------------------------------------------------------------------
    def describe(self) -> dict[str, str | float | None]:
        """What every figure of this clock carries: mode, profile, dilation (null unless paced)."""
        return {"mode": self.mode, "profile": self.system.name, "dilation": self.dilation}

    def utilisation(self) -> dict[str, LinkUse]:
        """What each link did, by link name; all zero in mode "off", which models no links."""
        elapsed = max(self._running.now_ns, 1)
        figures = zip(
            self.system.link_names,
            self._engine.link_busy_ns(),
            self._engine.link_bytes(),
            strict=True,
        )
        return {
            name: LinkUse(busy_ns, nbytes, busy_ns / elapsed) for name, busy_ns, nbytes in figures
        }

    # -- operations ---------------------------------------------------------------------------------------
    def compute(self, actor: str, duration_ns: int, label: str) -> Op:
        """Submit computation at the running actor's time; computes of one `actor` queue behind one another.

        Raises:
            UserError: a negative duration.
        """
        if duration_ns < 0:
            raise UserError(f"{label}: a compute of {duration_ns} ns", remedy="give 0 or more")
        number = self._actor_numbers.setdefault(actor, len(self._actor_numbers))
        due_ns = self._compute_due(number, duration_ns)
        return self._record(actor, "compute", NO_PATH, (0, 0, 0, duration_ns), due_ns, label)

    def transfer(  # noqa: PLR0913 - one operation of the log
        self,
        actor: str,
        path: Path,
        nbytes: int,
        rows: int,
        label: str,
        requests: int | None = None,
    ) -> Op:
        """Submit a transfer at the running actor's time; one of no bytes ends at once.

        Args:
            actor: for the log.
            path: of this clock's system.
            nbytes: what moves.
            rows: rows that move.
            label: for the log.
            requests: requests that the path's links see (work requests, contiguous runs); None: one per row.

        Raises:
            UserError: a negative size or count.
        """
        requests = rows if requests is None else requests
        if min(nbytes, rows, requests) < 0:
            raise UserError(
                f"{label}: a transfer of {nbytes} bytes, {rows} rows, {requests} requests",
                remedy="give 0 or more",
            )
        if path.number >= self._known_paths:
            self._known_paths = self.system.add_paths(self._engine, self._known_paths)
        due_ns = self._transfer_due(path, nbytes, requests)
        return self._record(actor, "transfer", path.key, (nbytes, rows, requests, 0), due_ns, label)

    def _record(  # noqa: PLR0913 - one operation of the log
        self,
        actor: str,
        kind: str,
        path: tuple[str, int, int],
        amounts: tuple[int, int, int, int],
        due_ns: int,
        label: str,
    ) -> Op:
        running, start_ns = self._running, self.now_ns
        op = Op(len(self.log), start_ns, self._reported_end(due_ns), due_ns, running.epoch)
        nbytes, rows, requests, duration_ns = amounts
        self.log.add(
            actor,
            kind,
            path,
            nbytes,
            rows,
            requests,
            duration_ns,
            running.after,
            running.not_before_ns,
            start_ns,
            op.end_ns,
            label,
        )
        return op

    # -- actors -------------------------------------------------------------------------------------------
    def spawn(self, name: str, program: Program, start_ns: int | None = None) -> None:
        """Add an actor; it starts at the caller's time, or at start_ns if that is later."""
        actor = _Actor(name, program)
        self._take_over(actor, self._running)
        if start_ns is not None:
            self._delay(actor, start_ns)
        self._push(actor)

    def signal(self, name: str = "signal") -> Signal:
        """A signal that actors of this clock can wait for."""
        return Signal(self, name)

    def run(self) -> None:
        """Run until every actor has ended.

        Raises:
            DeadlockError: actors are left that wait for signals which nobody can fire any more.
            Exception: whatever an actor raised; the others are closed first.
        """
        try:
            while self._queue:
                actor = heapq.heappop(self._queue)[2]
                self._running = actor
                self._pass_time(actor)
                self._join_if_many(actor)
                self._resume(actor)
            if self._parked:
                raise DeadlockError(
                    {actor.name: signal.name for actor, signal in self._parked.items()}
                )
        finally:
            self._close_all()
            self._take_over(self._outside, self._running)
            self._running = self._outside

    def _resume(self, actor: _Actor) -> None:
        assert actor.program is not None
        try:
            wait = next(actor.program)
        except StopIteration:
            return
        if isinstance(wait, Op):
            self._await_ops(actor, [wait])
        elif isinstance(wait, list):
            self._await_ops(actor, wait)
        elif isinstance(wait, Signal):
            self._await_signal(actor, wait)
        elif isinstance(wait, int):
            self._delay(actor, wait)
            self._push(actor)
        else:
            raise TypeError(f"actor {actor.name} yielded {wait!r}, not an Op, list, Signal or time")

    def _await_ops(self, actor: _Actor, ops: list[Op]) -> None:
        actor.waits_for = ops
        ids = tuple(op.id for op in ops)
        # An operation submitted since the last wait depends on all that came before: it stands for it.
        if any(op._epoch == actor.epoch for op in ops):
            actor.after, actor.not_before_ns = ids, 0
        else:
            actor.after = tuple(dict.fromkeys(actor.after + ids))
        actor.now_ns = max(actor.now_ns, *(op._due_ns for op in ops)) if ops else actor.now_ns
        self._turn(actor)
        self._push(actor)

    def _await_signal(self, actor: _Actor, signal: Signal) -> None:
        if signal._fired_by is None:
            signal._waiting.append(actor)
            self._parked[actor] = signal
        else:
            self._wake(actor, signal._fired_by)

    def _fire(self, signal: Signal) -> None:
        signal._fired_by = _Actor(self._running.name, None)
        self._take_over(signal._fired_by, self._running)
        for actor in signal._waiting:
            del self._parked[actor]
            self._wake(actor, signal._fired_by)
        signal._waiting.clear()

    def _wake(self, actor: _Actor, by: _Actor) -> None:
        actor.after = tuple(dict.fromkeys(actor.after + by.after))
        actor.not_before_ns = max(actor.not_before_ns, by.not_before_ns)
        actor.now_ns = max(actor.now_ns, by.now_ns)
        self._turn(actor)
        self._push(actor)

    def _take_over(self, actor: _Actor, other: _Actor) -> None:
        actor.now_ns, actor.after = other.now_ns, other.after
        actor.not_before_ns = other.not_before_ns
        self._turn(actor)

    def _delay(self, actor: _Actor, until_ns: int) -> None:
        actor.not_before_ns = max(actor.not_before_ns, until_ns)
        actor.now_ns = max(actor.now_ns, until_ns)
        self._turn(actor)

    def _turn(self, actor: _Actor) -> None:
        """What the actor submits from here on has other dependencies than what it submitted so far."""
        self._epochs += 1
        actor.epoch = self._epochs

    def _push(self, actor: _Actor) -> None:
        heapq.heappush(self._queue, (self._rank(actor), self._pushes, actor))
        self._pushes += 1

    def _join_if_many(self, actor: _Actor) -> None:
        """Keep the list of dependencies short: one operation of no length stands for them."""
        if len(actor.after) > _JOIN_ABOVE:
            op = self._record(actor.name, "join", NO_PATH, (0, 0, 0, 0), actor.now_ns, "join")
            actor.after, actor.not_before_ns = (op.id,), 0
            self._turn(actor)

    def _close_all(self) -> None:
        left = [actor for _, _, actor in self._queue] + list(self._parked)
        self._queue.clear()
        self._parked.clear()
        for actor in [*left, self._running]:
            if actor.program is not None:
                actor.program.close()


class VirtualClock(Clock):
    """Model time only: exact, the same on every machine, as fast as Python goes."""

    mode = "virtual"

    @property
    def now_ns(self) -> int:
        """Model time of the running actor."""
        return self._running.now_ns

    def _compute_due(self, actor: int, duration_ns: int) -> int:
        return self._engine.compute(actor, self._running.now_ns, duration_ns)

    def _transfer_due(self, path: Path, nbytes: int, requests: int) -> int:
        return self._engine.transfer(path.number, self._running.now_ns, nbytes, requests)


class PacedClock(VirtualClock):
    """Waits until the host has spent the model time times the dilation.

    What the actors really do meanwhile is absorbed. Reported times are the host's, divided by the dilation: they
    lie behind the model where the host does not keep up (`pace.late_ns`).

    Attributes:
        pace: the host's side: how late it was, what bandwidth it can pace.
    """

    mode = "paced"

    def __init__(self, system: System, dilation: float) -> None:
        super().__init__(system)
        self.dilation = dilation
        self.pace = HostPace(dilation)

    def run(self) -> None:
        """Run as the base class says; the host's time counts from the first run on."""
        self.pace.start()
        super().run()

    @property
    def now_ns(self) -> int:
        """Host time since the first run began, divided by the dilation."""
        return self.pace.now_ns()

    def _reported_end(self, due_ns: int) -> int:
        return max(due_ns, self.pace.now_ns())

    def _pass_time(self, actor: _Actor) -> None:
        begin_ns = self.pace.now_ns()
        end_ns = self.pace.wait_until(actor.now_ns)
        for op in actor.waits_for:
            if op._due_ns > begin_ns:  # it was still in flight
                op.end_ns = self.log.ends_ns[op.id] = max(op._due_ns, end_ns)
        actor.waits_for = []


class OffClock(Clock):
    """No model: operations end when they are submitted, times are the host's. Named times are not waited for."""

    mode = "off"

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._start_ns = time.monotonic_ns()

    @property
    def now_ns(self) -> int:
        """Host time since the clock was made."""
        return time.monotonic_ns() - self._start_ns

    def _compute_due(self, actor: int, duration_ns: int) -> int:  # noqa: ARG002
        return 0

    def _transfer_due(self, path: Path, nbytes: int, requests: int) -> int:  # noqa: ARG002
        return 0

    def _reported_end(self, due_ns: int) -> int:  # noqa: ARG002
        return self.now_ns

    def _rank(self, actor: _Actor) -> int:  # noqa: ARG002
        return 0
