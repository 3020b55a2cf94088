"""The closest name as a remedy."""

from __future__ import annotations

from emu.suggest import did_you_mean


def test_the_closest_name_or_all_of_them() -> None:
    assert did_you_mean("gahter", ["scatter", "gather"]) == "did you mean 'gather'?"
    assert did_you_mean("xyz", (name for name in ("b", "a"))) == "use one of b, a"
