"""The protocol with one flush, fence or check left out: the simulator must notice, for each of them.

The list is the code's own (`emu/native/pool/memory.h`, Site): whatever the protocol flushes, fences or checks has a
place in it, since the primitives take one.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pool_schedules import simulate_all

from emu import _native

SITES = _native.pool_sites()
SEEDS = 8_000  # a mutant is caught by one of them, most by one of the first hundred
BATCH = 50
POOL = Path(__file__).parents[1] / "emu" / "native" / "pool"
"""Mutants that no schedule of those catches."""
UNCAUGHT: frozenset[str] = frozenset()


def first_violation(site: str, seeds: int) -> dict[str, object] | None:
    """The lowest batch of seeds that shows the mutant, on all cores."""
    left_out = SITES.index(site)
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        starts = range(0, seeds, BATCH)
        width = os.cpu_count() or 1
        for at in range(0, len(starts), width):
            for seen in threads.map(
                lambda first: _native.pool_simulate(first, BATCH, left_out=left_out),
                starts[at : at + width],
            ):
                if seen["violation"]:
                    return seen
    return None


@pytest.mark.slow
@pytest.mark.parametrize("site", [site for site in SITES if site not in UNCAUGHT])
def test_what_is_left_out_is_noticed(site: str) -> None:
    seen = first_violation(site, SEEDS)
    assert seen is not None, f"nobody misses {site!r} in {SEEDS} schedules"


@pytest.mark.slow
def test_the_whole_protocol_passes_the_same_schedules() -> None:
    simulate_all({"first_seed": seed, "count": BATCH} for seed in range(0, SEEDS, BATCH))


def test_every_site_of_the_code_is_in_the_list() -> None:
    """Each name of the enum has one place in the list, and each is used by the protocol."""
    enum = (POOL / "memory.h").read_text().split("enum class Site")[1].split("};")[0]
    names = re.findall(r"^\s*(k\w+)\s*,", enum, re.MULTILINE)
    assert names[-1] == "kCount"
    assert len(names) - 1 == len(SITES) == len(set(SITES))
    code = (
        "".join(
            path.read_text()
            for path in POOL.glob("*.cc")
            if path.name not in ("sites.cc", "memory.h")
        )
        + (POOL / "registers.h").read_text()
    )
    for name in names[:-1]:
        assert f"Site::{name}" in code, f"{name} is in the list and nowhere in the protocol"
