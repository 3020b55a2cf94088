"""The closest name as a remedy."""

from __future__ import annotations

from emu.suggest import did_you_mean, unknown


def test_the_closest_name_or_all_of_them() -> None:
    assert did_you_mean("gahter", ["scatter", "gather"]) == "did you mean 'gather'?"
    assert did_you_mean("xyz", (name for name in ("b", "a"))) == "use one of b, a"


def test_an_unknown_name_is_an_error_that_says_the_closest() -> None:
    assert str(unknown("medium", "cxi", ["dram", "cxl"])) == "no medium 'cxi' (did you mean 'cxl'?)"
