"""Which studies there are, and running them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from emu.capacity.plan import PARAMETERS as XM_PARAMETERS
from emu.study import other_figures, sac_figures
from emu.study.sac import PARAMETERS, STRUCTURE, SacModel, Sensitivity, sensitivity
from emu.timing.profile import unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from emu.study.result import Study

SAC = {f"sac-{f.__name__}": f for f in sac_figures.SAC_FIGURES}
OTHER = {"beluga-sparse": other_figures.beluga} | {
    f.__name__.replace("_", "-"): f for f in other_figures.OTHER_FIGURES[1:]
}
IDS = (*SAC, *OTHER)
_NEED_SENSITIVITY = {"sac-fig10", "sac-fig11"}


def parse_ids(names: Sequence[str]) -> tuple[str, ...]:
    """Study ids; none, or "all", are all of them.

    Raises:
        UserError: an unknown id.
    """
    if not names or "all" in names:
        return IDS
    for name in names:
        if name not in IDS:
            raise unknown("study", name, [*IDS, "all"])
    return tuple(i for i in IDS if i in names)


def run_studies(
    ids: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> tuple[list[Study], Sensitivity | None]:
    """The studies in order, and the sensitivity where one of them predicts with an interval."""
    found: Sensitivity | None = None
    if _NEED_SENSITIVITY & set(ids):
        progress("sensitivity to the parameters")
        found = sensitivity()
    studies = []
    with SacModel() as model:
        for name in ids:
            progress(name)
            if name in SAC:
                studies.append(SAC[name](model, found or Sensitivity((), {})))
            else:
                studies.append(OTHER[name]())
    return studies, found


def parameters() -> dict[str, Any]:
    """Every parameter set: values, ranges, what they were fitted to, and the assumptions."""
    return {
        "sac": {"numbers": [asdict(p) for p in PARAMETERS], "assumptions": list(STRUCTURE)},
        "xm-sparse": {
            "numbers": [{"name": name, **asdict(p)} for name, p in XM_PARAMETERS.items()],
            "assumptions": [
                "One efficiency for every link, measured and modelled.",
                "Index keys of 22 layers of 128 B (the NextN layer counted), as the article's printed sizes ask for.",
                "K is 1024, GiB of GPU memory are 2^30, TB of external memory 10^12 bytes.",
            ],
        },
        "beluga": {
            "numbers": [],
            "assumptions": [
                "The profile beluga-server, derived from microbenchmarks alone; nothing was fitted."
            ],
        },
    }


def result_json(studies: Sequence[Study], found: Sensitivity | None) -> dict[str, Any]:
    """All of it as plain data."""
    rows = [row for study in studies for row in study.rows if row.met is not None]
    return {
        "studies": [study.to_json() for study in studies],
        "met": sum(1 for row in rows if row.met),
        "compared": len(rows),
        "parameters": parameters(),
        "sensitivity": None
        if found is None
        else {
            "factors": {k: [round(v, 4) for v in pair] for k, pair in found.factors.items()},
            "changes": [
                {"parameter": name, "value": value, **{k: round(v, 4) for k, v in change.items()}}
                for name, value, change in found.table
            ],
        },
    }
