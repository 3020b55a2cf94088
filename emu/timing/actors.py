"""Programs of actors, resumed in the order of model time.

An actor is a generator. What it yields is what it waits for: an `Op`, a list of `Op`s, a `Signal`, or a model time
in nanoseconds. What it waited for becomes what its next operations depend on.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeAlias

from emu.errors import DeadlockError

_JOIN_ABOVE = 16  # dependencies after which one "join" operation stands for them all


class Op:
    """An operation in flight or done.

    Attributes:
        id: its place in the log.
        start_ns: when it was submitted.
        end_ns: when it ends; in paced mode an estimate until someone has waited for it.
        due_ns: when it ends by the model.
        epoch: the waits of its actor before it: two operations of one epoch depend on the same ones.
    """

    __slots__ = ("due_ns", "end_ns", "epoch", "id", "start_ns")

    def __init__(self, number: int, start_ns: int, end_ns: int, due_ns: int, epoch: int) -> None:
        self.id = number
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.due_ns = due_ns
        self.epoch = epoch

    def __repr__(self) -> str:
        return f"Op(id={self.id}, start_ns={self.start_ns}, end_ns={self.end_ns})"


class Actor:
    """One program and where it stands: its time is the latest end of `after`, or `not_before_ns`.

    Attributes:
        name: for messages.
        program: None for what stands outside of every program.
        now_ns: its time by the model.
        after: ids of the operations that its next ones depend on.
        not_before_ns: the latest time that it, or whoever resumed it, waited for by name.
        epoch: changes with every wait.
        waits_for: the operations that it waits for now.
    """

    __slots__ = ("after", "epoch", "name", "not_before_ns", "now_ns", "program", "waits_for")

    def __init__(self, name: str, program: Program | None) -> None:
        self.name = name
        self.program = program
        self.now_ns = 0
        self.after: tuple[int, ...] = ()
        self.not_before_ns = 0
        self.epoch = 0
        self.waits_for: list[Op] = []

    def join(self, other: Actor) -> None:
        """Go on no earlier than the other one, and after what it comes after."""
        self.after = tuple(dict.fromkeys(self.after + other.after))
        self.not_before_ns = max(self.not_before_ns, other.not_before_ns)
        self.now_ns = max(self.now_ns, other.now_ns)


class Signal:
    """Lets actors wait for another one: `yield signal` until somebody calls fire(). It stays fired.

    Attributes:
        name: for messages.
        fired_by: a copy of where the one stood who fired it, None before.
        waiting: who waits.
    """

    def __init__(self, loop: ActorLoop, name: str) -> None:
        self.name = name
        self.fired_by: Actor | None = None
        self.waiting: list[Actor] = []
        self._loop = loop

    @property
    def fired(self) -> bool:
        """Whether fire() was called."""
        return self.fired_by is not None

    def fire(self) -> None:
        """Resume everyone who waits, at the caller's time; firing again changes nothing."""
        if self.fired_by is None:
            self._loop.fire(self)


Wait: TypeAlias = "Op | list[Op] | Signal | int"
Program: TypeAlias = Generator[Wait, None, None]


class ActorLoop(ABC):
    """Resumes actors in the order (time, push), one at a time."""

    def __init__(self) -> None:
        self._running = Actor("outside", None)
        self._queue: list[tuple[int, int, Actor]] = []
        self._pushes = 0
        self._epochs = 0
        self._parked: dict[Actor, Signal] = {}

    # -- what a clock decides -----------------------------------------------------------------------------
    @abstractmethod
    def _pass_time(self, actor: Actor) -> None:
        """Let the host reach the actor's time, before it resumes."""

    @abstractmethod
    def _log_join(self, actor: Actor) -> Op:
        """Log an operation of no length after everything that the actor comes after."""

    def _rank(self, actor: Actor) -> int:
        """Actors resume in this order; those of one rank in the order in which their waits began."""
        return actor.now_ns

    # -- what programs call -------------------------------------------------------------------------------
    def spawn(self, name: str, program: Program, start_ns: int | None = None) -> None:
        """Add an actor; it starts at the caller's time, or at start_ns if that is later."""
        actor = Actor(name, program)
        actor.join(self._running)
        if start_ns is not None:
            _delay(actor, start_ns)
        self._push(actor)

    def signal(self, name: str = "signal") -> Signal:
        """A signal that actors of this clock can wait for."""
        return Signal(self, name)

    def fire(self, signal: Signal) -> None:
        """What Signal.fire() does the first time."""
        signal.fired_by = Actor(self._running.name, None)
        signal.fired_by.join(self._running)
        for actor in signal.waiting:
            del self._parked[actor]
            actor.join(signal.fired_by)
            self._push(actor)
        signal.waiting.clear()

    def run(self) -> None:
        """Run until every actor has ended.

        Raises:
            DeadlockError: actors are left that wait for signals which nobody can fire any more.
            Exception: whatever an actor raised; the others are closed first.
        """
        try:
            while self._queue:
                self._running = heapq.heappop(self._queue)[2]
                self._pass_time(self._running)
                self._keep_short(self._running)
                self._resume(self._running)
            if self._parked:
                raise DeadlockError(
                    {actor.name: signal.name for actor, signal in self._parked.items()}
                )
        finally:
            self._close_all()
            outside = Actor("outside", None)
            outside.join(self._running)
            self._running = outside

    # -- how ----------------------------------------------------------------------------------------------
    def _resume(self, actor: Actor) -> None:
        assert actor.program is not None
        try:
            wait = next(actor.program)
        except StopIteration:
            return
        if isinstance(wait, Signal):
            self._await_signal(actor, wait)
            return
        if isinstance(wait, Op):
            _await_ops(actor, [wait])
        elif isinstance(wait, list):
            _await_ops(actor, wait)
        elif isinstance(wait, int):
            _delay(actor, wait)
        else:
            raise TypeError(f"actor {actor.name} yielded {wait!r}, not an Op, list, Signal or time")
        self._push(actor)

    def _await_signal(self, actor: Actor, signal: Signal) -> None:
        if signal.fired_by is None:
            signal.waiting.append(actor)
            self._parked[actor] = signal
        else:
            actor.join(signal.fired_by)
            self._push(actor)

    def _push(self, actor: Actor) -> None:
        self._epochs += 1
        actor.epoch = self._epochs
        heapq.heappush(self._queue, (self._rank(actor), self._pushes, actor))
        self._pushes += 1

    def _keep_short(self, actor: Actor) -> None:
        if len(actor.after) > _JOIN_ABOVE:
            actor.after, actor.not_before_ns = (self._log_join(actor).id,), 0

    def _close_all(self) -> None:
        left = [actor for _, _, actor in self._queue] + list(self._parked)
        self._queue.clear()
        self._parked.clear()
        for actor in [*left, self._running]:
            if actor.program is not None:
                actor.program.close()


def _await_ops(actor: Actor, ops: list[Op]) -> None:
    actor.waits_for = ops
    ids = tuple(op.id for op in ops)
    # An operation submitted since the last wait depends on all that came before: it stands for it.
    if any(op.epoch == actor.epoch for op in ops):
        actor.after, actor.not_before_ns = ids, 0
    else:
        actor.after = tuple(dict.fromkeys(actor.after + ids))
    actor.now_ns = max([actor.now_ns, *(op.due_ns for op in ops)])


def _delay(actor: Actor, until_ns: int) -> None:
    actor.not_before_ns = max(actor.not_before_ns, until_ns)
    actor.now_ns = max(actor.now_ns, until_ns)
