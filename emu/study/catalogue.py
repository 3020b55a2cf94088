"""Which studies there are, and running them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from emu.capacity.plan import PARAMETERS as XM_PARAMETERS
from emu.study import beluga, candidates, sac_reads, sac_rounds, sac_scaling, xm_sparse
from emu.study.result import ORIGINS
from emu.study.sac import PARAMETERS, STRUCTURE, SacModel
from emu.study.sensitivity import Sensitivity, sensitivity
from emu.suggest import unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from emu.study.result import Study

SAC: Mapping[str, Callable[[SacModel, Sensitivity], Study]] = {
    "sac-fig4": sac_reads.fig4,
    "sac-fig5": sac_reads.fig5,
    "sac-fig9": sac_rounds.fig9,
    "sac-fig10": sac_rounds.fig10,
    "sac-fig11": sac_scaling.fig11,
    "sac-fig12": sac_scaling.fig12,
    "sac-fig13": sac_scaling.fig13,
    "sac-fig14": sac_scaling.fig14,
}
OTHER: Mapping[str, Callable[[], Study]] = {
    "beluga-sparse": beluga.beluga,
    "xm-fig2": xm_sparse.xm_fig2,
    "xm-fig3": xm_sparse.xm_fig3,
    "xm-fig5": xm_sparse.xm_fig5,
    "xm-fig6": xm_sparse.xm_fig6,
}
IDS = (*SAC, *OTHER)
_READS = {"sac-fig5"}
_SETTINGS = {"sac-fig10", "sac-fig11"}
_SERVING = {"sac-fig10", "sac-fig11", "sac-fig12", "sac-fig14"}


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


@dataclass(frozen=True, slots=True)
class Findings:
    """What running studies gave.

    Attributes:
        studies: in order.
        sensitivity: where one of them predicts with an interval.
        settings: of emu.study.candidates, where one of them depends on the choice.
    """

    studies: tuple[Study, ...]
    sensitivity: Sensitivity | None
    settings: tuple[dict[str, Any], ...]


def run_studies(
    ids: Sequence[str], progress: Callable[[str], None] = lambda _: None, seed: int = 0
) -> Findings:
    """Run studies by id."""
    found: Sensitivity | None = None
    if (_READS | _SERVING) & set(ids):
        progress("sensitivity to the parameters")
        found = sensitivity(seed, bool(_SERVING & set(ids)))
    studies = []
    with SacModel(seed=seed) as model:
        for name in ids:
            progress(name)
            if name in SAC:
                studies.append(SAC[name](model, found or Sensitivity()))
            else:
                studies.append(OTHER[name]())
    settings = candidates.candidates(seed, progress) if _SETTINGS & set(ids) else []
    return Findings(tuple(studies), found, tuple(settings))


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
            "numbers": [asdict(p) for p in beluga.PARAMETERS],
            "assumptions": [
                "The profile beluga-server, derived from microbenchmarks alone; nothing was fitted."
            ],
        },
    }


def result_json(findings: Findings) -> dict[str, Any]:
    """All of it as plain data."""
    found = findings.sensitivity
    rows = [row for study in findings.studies for row in study.rows if row.met is not None]
    xm = {
        text: xm_sparse.xm_changes(xm_sparse.xm_gain("CXL", "scale-up", context))
        for text, context in (("16K, 900 over 64 GB/s", 16 << 10), ("128K", 128 << 10))
    }
    return {
        "studies": [study.to_json() for study in findings.studies],
        "met": {
            origin: sum(1 for row in rows if row.met and row.origin == origin) for origin in ORIGINS
        },
        "compared": {origin: sum(1 for row in rows if row.origin == origin) for origin in ORIGINS},
        "settings": list(findings.settings),
        "parameters": parameters(),
        "xm_sensitivity": [
            {
                "parameter": name,
                "value": value,
                **{text: round(found[name, value], 4) for text, found in xm.items()},
            }
            for name, value in next(iter(xm.values()))
        ],
        "sensitivity": None
        if found is None
        else {
            "factors": {
                k: [round(v, 4) for v in pair] for k, pair in (found.factors or {}).items()
            },
            "changes": [
                {"parameter": name, "value": value, **{k: round(v, 4) for k, v in change.items()}}
                for name, value, change in found.table
            ],
        },
    }
