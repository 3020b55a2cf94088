"""Hosts of a protocol in turns, as a seed says: one thread each, of which one runs at a time."""

from __future__ import annotations

import functools
import random
import threading
from typing import TYPE_CHECKING

from emu.testing.shadow import LINE_BYTES, Caught, Host, Medium, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class _Ended(BaseException):
    """The schedule is over: a host's function must not go on."""


def find_violation(
    hosts: Sequence[Callable[[Host], object]],
    *,
    nbytes: int,
    seeds: Iterable[int] = range(1000),
    max_steps: int = 10_000,
) -> Violation | None:
    """Play the hosts against each other on a memory of zeros, one schedule a seed; the first violation, or None.

    The same seed gives the same schedule, as long as the functions depend on nothing else.

    Args:
        hosts: one function a host; it is called once a schedule, and talks to others only through its `Host`.
        nbytes: size of the shared memory, a multiple of 64.
        seeds: of the schedules.
        max_steps: primitives of a schedule; one that needs more is "stuck": somebody waits for ever.
    """
    for seed in seeds:
        found = _Schedule(hosts, nbytes, seed, max_steps).play()
        if found:
            return found
    return None


class _Schedule:
    def __init__(
        self, bodies: Sequence[Callable[[Host], object]], nbytes: int, seed: int, max_steps: int
    ) -> None:
        self._seed = seed
        self._max_steps = max_steps
        self._rng = random.Random(seed)
        self._switching = self._rng.choice([1.0, 0.5, 0.1, 0.02])
        self._medium = Medium(nbytes, self._rng)
        self._turns = [threading.Semaphore(0) for _ in bodies]
        self._back = threading.Semaphore(0)
        self._running: list[int] = list(range(len(bodies)))
        self._found: Violation | None = None
        self._over = False
        self._threads = []
        for number, body in enumerate(bodies):
            host = Host(self._medium, number, functools.partial(self._turn, number))
            thread = threading.Thread(target=self._run, args=(number, body, host), daemon=True)
            self._threads.append(thread)

    def play(self) -> Violation | None:
        for thread in self._threads:
            thread.start()
        while self._running:
            self._over = self._over or self._found is not None
            self._turns[self._rng.choice(self._running)].release()
            self._back.acquire()
        for thread in self._threads:
            thread.join()
        return self._found

    def _run(self, number: int, body: Callable[[Host], object], host: Host) -> None:
        self._turns[number].acquire()
        try:
            if not self._over:
                body(host)
        except _Ended:
            pass
        except Caught as caught:
            self._find(caught.kind, caught.hosts, caught.address, caught.missing)
        except Exception as error:
            self._find("error", (-1, number), 0, f"{type(error).__name__}: {error}")
        finally:
            self._running.remove(number)
            self._back.release()

    def _turn(self, number: int) -> None:
        """Before a primitive: perhaps let another host run."""
        if self._medium.step > self._max_steps and not self._over:
            self._find("stuck", (-1, number), 0, "somebody waits for ever")
        if not self._over and self._rng.random() < self._switching:
            self._back.release()
            self._turns[number].acquire()
        if self._over:
            raise _Ended

    def _find(self, kind: str, hosts: tuple[int, int], address: int, missing: str) -> None:
        self._over = True
        if self._found is None:
            self._found = Violation(
                kind, hosts, address, address // LINE_BYTES, missing, self._seed
            )
