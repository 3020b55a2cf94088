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
from pool_schedules import SCHEDULES, simulate_all

from emu import _native

SITES = _native.pool_sites()
SEEDS = 20_000  # a mutant is caught by one of them, most by one of the first hundred
LONG_SEEDS = 200
LONG = 60  # scenes of each host: the logs wrap, and hosts come back to snapshots that they have read before
BATCH = 50
NEEDS_LONG = {"drop snapshot", "fence checkpoints"}
POOL = Path(__file__).parents[1] / "emu" / "native" / "pool"


def first_violation(site: str) -> dict[str, object] | None:
    """What the schedules show of a mutant, in order of their seeds, on all cores."""
    plot = {"count": BATCH, "left_out": SITES.index(site)}
    if site in NEEDS_LONG:
        plot["scenes"] = LONG
    seeds = LONG_SEEDS if site in NEEDS_LONG else SEEDS
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:
        for first in range(0, seeds, BATCH * cores):
            plots = [plot | {"first_seed": first + BATCH * core} for core in range(cores)]
            for seen in threads.map(lambda p: _native.pool_simulate(**p), plots):
                if seen["violation"]:
                    return seen
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "site",
    [
        pytest.param(
            site,
            marks=[pytest.mark.xfail(reason="needed, as a ticket's is; no schedule shows it yet")]
            if site == "fence verdict"
            else [],
        )
        for site in SITES
    ],
)
def test_what_is_left_out_is_noticed(site: str) -> None:
    seen = first_violation(site)
    assert seen is not None, f"nobody misses {site!r}"


@pytest.mark.slow
def test_the_whole_protocol_passes_the_long_schedules() -> None:
    """The short ones too: `test_pool_schedules.py` plays them, and more."""
    assert SEEDS <= SCHEDULES
    plots = ({"first_seed": s, "count": 10, "scenes": LONG} for s in range(0, LONG_SEEDS, 10))
    simulate_all(plots)


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
