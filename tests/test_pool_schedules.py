"""The pool's protocol on the shadow medium: adversarial schedules, and a crash or a pause at every step.

A schedule is a seed: which host runs when, what the caches do, who dies, sleeps or stops where. After each, a newcomer
must find every published request with its bytes, nothing half done, no block owned twice and, once everybody's leases
have expired, no block lost.
"""

from __future__ import annotations

import pytest
from pool_schedules import SCHEDULES, replay, simulate_all

from emu import _native

CRASH_POINTS = 10_000
BATCH = 500


@pytest.mark.slow
def test_adversarial_schedules() -> None:
    seen = simulate_all({"first_seed": seed, "count": BATCH} for seed in range(0, SCHEDULES, BATCH))
    assert seen["published"] > SCHEDULES
    assert seen["read"] > SCHEDULES // 4
    assert seen["crashed"] > SCHEDULES // 20, "the hosts hardly die"
    assert seen["expired"] > SCHEDULES // 20, "the hosts hardly expire"


@pytest.mark.slow
def test_a_crash_at_any_step() -> None:
    """Host 0 dies at each of its first steps in turn, in a schedule of its own for each."""
    seen = simulate_all(crash_points(count=CRASH_POINTS, pauses=False))
    assert seen["crashed"] >= CRASH_POINTS, "a host was done before it should have died"


@pytest.mark.slow
def test_a_pause_past_its_expiry_at_any_step() -> None:
    seen = simulate_all(crash_points(count=2_000, pauses=True))
    assert seen["expired"] > 1_000, "the hosts hardly notice that they slept too long"


def crash_points(*, count: int, pauses: bool) -> list[dict[str, int | bool]]:
    """Every step of the first 500 comes equally often: joining, publishing, reading, each in many schedules."""
    return [
        {"first_seed": 1_000_000 + point, "count": 1, "victim_step": point % 500, "pauses": pauses}
        for point in range(count)
    ]


def test_a_schedule_is_its_seed_alone() -> None:
    """What fails once fails again: two runs of the same seeds do the same, step by step."""
    first = _native.pool_simulate(77, 40)
    assert _native.pool_simulate(77, 40) == first
    assert _native.pool_simulate(78, 40) != first


def test_a_failure_says_how_to_see_it_again() -> None:
    plot = {"first_seed": 0, "count": 100, "left_out": _native.pool_sites().index("flush rows")}
    seen = _native.pool_simulate(**plot)
    text = replay(plot, seen)
    assert seen["violation"]
    assert seen["violation"] in text
    again = eval(text.split("again: ")[1], {"emu": __import__("emu")})
    assert again["violation"] == seen["violation"]
    assert again["seed"] == seen["seed"]
