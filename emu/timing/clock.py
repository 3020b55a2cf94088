"""Clocks: each operation that an actor submits gets its times.

Operations are submitted at the actor's own time. A transfer reserves its links there and then, so links are first
in, first out by model time, and the end is known at once.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.suggest import unknown
from emu.timing.actors import Actor, ActorLoop, Op, Program, Signal
from emu.timing.oplog import OpLog, OpRow
from emu.timing.pace import HostPace

if TYPE_CHECKING:
    from emu.timing.system import Path, System

__all__ = [
    "Clock",
    "LinkUse",
    "OffClock",
    "Op",
    "PacedClock",
    "Program",
    "Signal",
    "VirtualClock",
    "make_clock",
]

MODES = ("off", "virtual", "paced")


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link did during a run.

    Attributes:
        busy_ns: model time that it was occupied.
        nbytes: what crossed it.
        utilisation: busy_ns over the run's model time, 0 where no time passed.
    """

    busy_ns: int
    nbytes: int
    utilisation: float


class Clock(ActorLoop):
    """Runs actors and gives their operations times.

    Attributes:
        mode: "off", "virtual" or "paced".
        dilation: host time per model time where the clock paces, else None.
        system: what is modelled.
        log: every operation so far.
    """

    mode: str

    def __init__(self, system: System) -> None:
        super().__init__()
        self.system = system
        self.dilation: float | None = None
        self.log = OpLog()
        self._engine = system.engine()
        self._known_paths = 0
        self._actor_numbers: dict[str, int] = {}

    # -- what a mode decides ------------------------------------------------------------------------------
    @property
    @abstractmethod
    def now_ns(self) -> int:
        """Time of the running actor; outside run(), of the last one that ran."""

    @property
    def modelled_ns(self) -> int:
        """Time of the running actor by the model, however late the host is; in mode "off" the host's, as now_ns."""
        return self.now_ns

    @abstractmethod
    def _compute_due(self, actor: int, duration_ns: int) -> int:
        """When a compute submitted now is through, by the model."""

    @abstractmethod
    def _transfer_due(self, path: Path, nbytes: int, requests: int) -> int:
        """When a transfer submitted now is through, by the model."""

    @abstractmethod
    def _reported_end(self, due_ns: int) -> int:
        """The end to report for an operation that is submitted now."""

    # -- figures ------------------------------------------------------------------------------------------
    def describe(self) -> dict[str, str | float | None]:
        """What every figure of this clock carries: mode, profile, dilation (None unless paced)."""
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
        return self._record(
            OpRow(actor=actor, kind="compute", duration_ns=duration_ns, label=label), due_ns
        )

    def transfer(
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
        row = OpRow(
            actor=actor,
            kind="transfer",
            path=path.name,
            gpu=path.gpu,
            device=path.device,
            bytes=nbytes,
            rows=rows,
            requests=requests,
            label=label,
        )
        return self._record(row, self._transfer_due(path, nbytes, requests))

    def _record(self, row: OpRow, due_ns: int) -> Op:
        running, row.id = self._running, len(self.log)
        row.after, row.not_before_ns = running.after, running.not_before_ns
        row.start_ns, row.end_ns = self.now_ns, self._reported_end(due_ns)
        self.log.ops.append(row)
        return Op(row.id, row.start_ns, row.end_ns, due_ns, running.epoch)

    def _log_join(self, actor: Actor) -> Op:
        return self._record(OpRow(actor=actor.name, kind="join", label="join"), actor.now_ns)


class VirtualClock(Clock):
    """Model time only: exact, the same on every machine, as fast as Python goes."""

    mode = "virtual"

    @property
    def now_ns(self) -> int:
        """Model time of the running actor."""
        return self._running.now_ns

    @property
    def modelled_ns(self) -> int:
        """As now_ns; a paced clock's now_ns is the host's."""
        return self._running.now_ns

    def _compute_due(self, actor: int, duration_ns: int) -> int:
        return self._engine.compute(actor, self._running.now_ns, duration_ns)

    def _transfer_due(self, path: Path, nbytes: int, requests: int) -> int:
        return self._engine.transfer(path.number, self._running.now_ns, nbytes, requests)

    def _reported_end(self, due_ns: int) -> int:
        return due_ns

    def _pass_time(self, actor: Actor) -> None:
        actor.waits_for = []


class _HostTimed(Clock):
    """Reports the host's time: from the first run's begin on, standing still between runs."""

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._stopped_ns = 0

    @abstractmethod
    def _start(self) -> None:
        """A run begins."""

    @abstractmethod
    def _host_ns(self) -> int:
        """The time to report, while a run goes on."""

    @property
    def now_ns(self) -> int:
        """Host time since the first run began (paced: divided by the dilation)."""
        return self._stopped_ns if self._running.program is None else self._host_ns()

    def run(self) -> None:
        """Run as the base class says, and keep the time at which it ended."""
        self._start()
        try:
            super().run()
        finally:
            self._stopped_ns = self._host_ns()

    def _reported_end(self, due_ns: int) -> int:
        return max(due_ns, self.now_ns)


class PacedClock(_HostTimed, VirtualClock):
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

    def describe(self) -> dict[str, str | float | None]:
        """As every clock's, and what this machine can pace (GB/s) and how late it was at worst (model ns)."""
        return {
            **super().describe(),
            "paceable_gb_per_s": round(self.pace.paceable_gb_per_s(), 3),
            "late_ns": self.pace.late_ns,
        }

    def _start(self) -> None:
        self.pace.start()

    def _host_ns(self) -> int:
        return self.pace.now_ns()

    def _pass_time(self, actor: Actor) -> None:
        begin_ns = self.pace.now_ns()
        end_ns = self.pace.wait_until(actor.now_ns)
        for op in actor.waits_for:
            if op.due_ns > begin_ns and op.due_ns == actor.now_ns:  # the one that was waited for
                op.end_ns = self.log.ops[op.id].end_ns = end_ns
        actor.waits_for = []


class OffClock(_HostTimed):
    """No model: operations end when they are submitted, times are the host's. Named times are not waited for."""

    mode = "off"

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._start_ns: int | None = None

    def describe(self) -> dict[str, str | float | None]:
        """The mode alone: no profile has a part in host time."""
        return {**super().describe(), "profile": None}

    def _start(self) -> None:
        if self._start_ns is None:
            self._start_ns = time.monotonic_ns()

    def _host_ns(self) -> int:
        assert self._start_ns is not None
        return time.monotonic_ns() - self._start_ns

    def _compute_due(self, actor: int, duration_ns: int) -> int:
        return 0

    def _transfer_due(self, path: Path, nbytes: int, requests: int) -> int:
        return 0

    def _rank(self, actor: Actor) -> int:
        return 0

    def _pass_time(self, actor: Actor) -> None:
        actor.waits_for = []


def make_clock(system: System, mode: str = "virtual", dilation: float = 1.0) -> Clock:
    """The clock of a mode: "off", "virtual" or "paced" (dilation: host time per model time, paced only).

    Raises:
        UserError: no such mode, or a dilation that is not a positive number.
    """
    if mode not in MODES:
        raise unknown("time mode", mode, MODES)
    if mode == "paced":
        return PacedClock(system, dilation)
    return VirtualClock(system) if mode == "virtual" else OffClock(system)
