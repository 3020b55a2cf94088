"""Interleaved timing: what is compared takes turns, so that a noisy machine disturbs all of it alike."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu.errors import EmuError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Trial:
    """One timed call.

    Attributes:
        run: what is timed.
        verify: looks, untimed, whether it did the right thing.
    """

    run: Callable[[], object]
    verify: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Attributes:
        name: for the table.
        prepare: makes the next trial, untimed: fresh indices, dirty lines.
    """

    name: str
    prepare: Callable[[], Trial]


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are compared with each other; the first is the base of the ratios.

    Attributes:
        name: for the table.
        item: what one trial moves many of: "row" or "line".
        items: how many.
        nbytes: bytes that one trial moves.
        cases: the cases.
        skipped: (case, reason) of what this machine cannot time.
    """

    name: str
    item: str
    items: int
    nbytes: int
    cases: tuple[Case, ...]
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """What one case took, in host time.

    Attributes:
        name: the case.
        median_ns: of one trial.
        ratio_p15, ratio_p50, ratio_p85: time divided by the base's in the same round, over the rounds.
    """

    name: str
    median_ns: float
    ratio_p15: float
    ratio_p50: float
    ratio_p85: float


def measure(group: Group, rounds: int) -> list[Figure]:
    """Time a group's cases, each once a round, beginning with another one every round.

    Raises:
        EmuError: a case did the wrong thing.
    """
    spent_ns = np.zeros((rounds, len(group.cases)))
    for turn in range(-1, rounds):  # the first round warms up and is not counted
        for step in range(len(group.cases)):
            place = (turn + step) % len(group.cases)
            spent = _time_once(group, group.cases[place])
            if turn >= 0:
                spent_ns[turn, place] = spent
    ratios = spent_ns / spent_ns[:, :1]
    return [
        Figure(case.name, float(median), *(float(value) for value in quantiles))
        for case, median, quantiles in zip(
            group.cases,
            np.median(spent_ns, axis=0),
            np.quantile(ratios, (0.15, 0.5, 0.85), axis=0).T,
            strict=True,
        )
    ]


def _time_once(group: Group, case: Case) -> int:
    trial = case.prepare()
    begin = time.perf_counter_ns()
    trial.run()
    spent = time.perf_counter_ns() - begin
    if not trial.verify():
        raise EmuError(f"bench: {group.name}: {case.name} moved wrong bytes")
    return spent


def report(groups: Sequence[Group], rounds: int) -> list[dict[str, object]]:
    """Measure all groups; JSON-ready, one entry a group."""
    return [
        {
            "group": group.name,
            "item": group.item,
            "items": group.items,
            "bytes": group.nbytes,
            "base": group.cases[0].name if group.cases else "",
            "cases": [
                {
                    "name": figure.name,
                    "median_ns": figure.median_ns,
                    "ns_per_item": figure.median_ns / group.items,
                    "gb_per_s": group.nbytes / figure.median_ns,
                    "ratio": {
                        "p15": figure.ratio_p15,
                        "p50": figure.ratio_p50,
                        "p85": figure.ratio_p85,
                    },
                }
                for figure in measure(group, rounds)
            ],
            "skipped": [{"name": name, "reason": reason} for name, reason in group.skipped],
        }
        for group in groups
    ]
