"""The files of `emu reproduce`: a PNG and a table for each study, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
import json
from typing import TYPE_CHECKING, Any

from emu.study.candidates import QUANTITIES
from emu.study.sensitivity import WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from emu.study.result import Row, Study

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; width: 100% } caption { text-align: left; color: #555 }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.n { text-align: right; white-space: nowrap } .yes { color: #176d2d } .no { color: #a31515; font-weight: 600 }
img { max-width: 100% } .reason { color: #a31515 } code { background: #f3f3f3 }
"""
_INTRODUCTION = """
<p>Large language models keep a key and value (KV) row for every token and layer. With sparse attention a step of
decoding reads only the best 2048 rows of each layer, so most rows may lie outside of the GPU: in local DRAM, in a pool
of CXL memory (SAC), or in another machine's memory over RDMA. A hot buffer in GPU memory keeps recently read rows.
This page puts published figures beside what <code>emu</code>'s model says.</p>
<p><b>Words.</b> TTFT: time to first token. TBT or TPOT: time between tokens, per output token. Throughput: output
tokens per second, of all GPUs unless said otherwise. All times are model time: nothing was measured on this machine.</p>
<p><b>Rules.</b> Microbenchmarks calibrate the model; end-to-end figures are predicted. Each paper has one set of
parameters for all of its figures. A value that was used to choose a parameter is marked "fitted" and proves nothing;
one that was known when the setting was chosen among several is marked "selected", and the settings are listed;
what the model misses is shown with the reason. Intervals come from the parameters' ranges. Published values are at
second hand where the papers were not at hand.</p>
"""

_PAPERS = {
    "sac": (
        "SAC (arXiv 2606.19746)",
        "A server of eight H20 GPUs serves DeepSeek-V3.2, whose decoding reads 2048 rows of each layer. SAC leaves all "
        "rows in a pool of two CXL devices behind a switch, and the GPUs read what a step selects. It is compared with "
        "RDMA over 100 Gb/s NICs, which first copies the whole KV to local DRAM, with KV in local DRAM from the start, "
        "and with GPU memory only. The model runs the same requests through a simulator of links, memory and steps.",
    ),
    "beluga": (
        "Beluga (arXiv 2511.20172)",
        "The same switch family, with 32 CXL devices. Beluga measures single copies and reads, and then sparse reads of "
        "KV by a GPU. The first give the model's numbers, the second are predicted.",
    ),
    "xm-sparse": (
        "XM-Sparse (LMSYS and Netpreme, 5 November 2026)",
        "Four B300 GPUs decode GLM-5.3, whose rows lie in external memory: host DRAM over PCIe, CXL, a CPU's memory over "
        "NVLink, or memory on a scale-up fabric. The article asks how bandwidth and capacity of that memory "
        "limit batch and throughput, by a model, and measures two of the tiers. Ours is its closed form with a step time.",
    ),
}


def write_report(directory: Path, studies: Sequence[Study], result: dict[str, Any]) -> list[Path]:
    """Write ID.png and ID.md for each study, results.json and report.html; the files written."""
    written = []
    images = {}
    for study in studies:
        images[study.id] = _png(study)
        for suffix, content in ((".png", images[study.id]), (".md", _markdown(study).encode())):
            file = directory / f"{study.id}{suffix}"
            file.write_bytes(content)
            written.append(file)
    data = directory / "results.json"
    data.write_text(json.dumps({"schema_version": 1, **result}, indent=2) + "\n")
    page = directory / "report.html"
    page.write_text(_html(studies, result, images), encoding="utf-8")
    return [*written, data, page]


def number(value: float | None) -> str:
    """Four significant digits."""
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def cells(row: Row) -> tuple[str, ...]:
    """quantity, published, model, interval, error, origin, met."""
    published = number(row.published)
    if row.limits is not None:
        published = f"{number(row.limits[0])} .. {number(row.limits[1])}"
    return (
        row.quantity,
        published,
        f"{number(row.model)} {row.unit}".strip(),
        "" if row.low is None or row.high is None else f"{number(row.low)} .. {number(row.high)}",
        "" if row.error is None else f"{row.error:+.1%}",
        row.origin,
        {True: "yes", False: "no", None: ""}[row.met],
    )


def verdict(result: dict[str, Any]) -> str:
    """How many comparisons are met, by what the published value was used for."""
    counts = ", ".join(
        f"{result['met'][origin]} of {total} {origin}"
        for origin, total in result["compared"].items()
        if total
    )
    return f"within the tolerance: {counts or 'nothing to compare'}"


def settings_table(settings: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: each setting's ratios under the published ones."""
    header = ["setting", *(words for words, _ in QUANTITIES.values())]
    published = ["published", *(number(value) for _, value in QUANTITIES.values())]
    rows = [[s["setting"], *(number(s[key]) for key in QUANTITIES)] for s in settings]
    return header, [published, *rows]


HEADER = ("quantity", "published", "model", "interval", "error", "origin", "met")


def _markdown(study: Study) -> str:
    lines = [
        f"# {study.title}",
        "",
        study.text,
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" * len(HEADER) + "|",
    ]
    for row in study.rows:
        lines.append("| " + " | ".join(cells(row)) + " |")
    lines += [f"\nMissed: {row.quantity}. {row.reason}" for row in study.rows if row.reason]
    return "\n".join(lines) + "\n"


def _png(study: Study) -> bytes:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(study.panels),
        figsize=(5.2 * len(study.panels), 3.8),
        layout="constrained",
        squeeze=False,
    )
    for place, (panel, ax) in enumerate(zip(study.panels, axes[0], strict=True)):
        for curve in (c for c in study.curves if c.panel == place):
            style = (
                {"marker": "x", "linestyle": "none", "color": "black"}
                if curve.published
                else {"marker": "o"}
            )
            ax.plot(curve.x, curve.y, label=curve.label, markersize=5, **style)
        ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        if panel.logx:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if panel.logy:
            ax.set_yscale("log")
        if not panel.logy:
            ax.set_ylim(bottom=0)
        ax.legend(frameon=False, fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{study.id}: model time", fontsize=9, x=0.01, ha="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": "emu"})
    plt.close(figure)
    return buffer.getvalue()


def _html(studies: Sequence[Study], result: dict[str, Any], images: dict[str, bytes]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Published figures against the model</title>",
        f"<style>{_STYLE}</style><h1>Published figures against the model</h1>{_INTRODUCTION}",
        f"<p><b>{verdict(result)}</b></p>",
        "<ul>"
        + "".join(f'<li><a href="#{s.id}">{_text(s.title)}</a></li>' for s in studies)
        + "</ul>",
    ]
    paper = ""
    for study in studies:
        if study.parameters != paper:
            paper = study.parameters
            parts.append(f"<h2>{_PAPERS[paper][0]}</h2><p>{_PAPERS[paper][1]}</p>")
        image = base64.b64encode(images[study.id]).decode()
        parts.append(
            f'<h3 id="{study.id}">{_text(study.title)}</h3><p>{_text(study.text)}</p>'
            f'<img alt="{_text(study.title)}" src="data:image/png;base64,{image}">'
        )
        parts.append(_rows(study))
    parts.append(_settings(result["settings"]))
    parts.append(_parameters(result))
    parts.append(_sensitivity(result["sensitivity"]))
    parts.append("<h2>Sensitivity of XM-Sparse's ratios</h2>" + _changes(result["xm_sensitivity"]))
    return "\n".join(parts) + "</html>\n"


def _rows(study: Study) -> str:
    lines = []
    for row in study.rows:
        values = cells(row)
        mark = {True: "yes", False: "no", None: ""}[row.met]
        columns = "".join(
            f"<td{' class=n' if 1 <= i <= 4 else ''}>{_text(value)}</td>"
            for i, value in enumerate(values[:-1])
        )
        lines.append(f"<tr>{columns}<td class={mark or 'none'}>{values[-1]}</td></tr>")
        if row.reason:
            lines.append(
                f"<tr><td colspan={len(values)} class=reason>{_text(row.reason)}</td></tr>"
            )
    caption = f"<caption>{study.id}; parameter set {study.parameters}</caption>"
    return _table(HEADER, "".join(lines), caption)


def _parameters(result: dict[str, Any]) -> str:
    parts = ["<h2>Parameters and assumptions</h2>"]
    for name, group in result["parameters"].items():
        parts.append(f"<h3>{_text(name)}</h3>")
        rows = "".join(
            f"<tr><td>{_text(p['name'])}</td><td class=n>{number(p['value'])}</td>"
            f"<td class=n>{number(p['low'])} .. {number(p['high'])}</td><td>{_text(p['unit'])}</td>"
            f"<td>{_text(p.get('basis', 'fitted'))}</td><td>{_text(p.get('source') or p['fitted_to'])}</td></tr>"
            for p in group["numbers"]
        )
        if rows:
            parts.append(
                _table(
                    ("parameter", "value", "range", "unit", "basis", "source or fitted to"), rows
                )
            )
        parts.append(
            "<ul>" + "".join(f"<li>{_text(a)}</li>" for a in group["assumptions"]) + "</ul>"
        )
    return "".join(parts)


def _settings(settings: Sequence[dict[str, Any]]) -> str:
    if not settings:
        return ""
    header, rows = settings_table(settings)
    cells_of = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        "<h2>Settings of SAC's server that were tried</h2><p>SAC's paper leaves open how requests arrive, whether decoding "
        "waits for a prefetch, how many NICs there are and what one device gives. The setting in use was chosen by people "
        "who knew the published ratios, so the ratios that depend on it are marked selected. Each row is one other "
        "choice, all else equal.</p>" + _table(header, cells_of)
    )


def _sensitivity(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        "<h2>Sensitivity of the SAC ratios</h2><p>One parameter at a time goes to an end of its range; the other numbers "
        "are what that does to each prediction (ratios against RDMA and DRAM: the mean over 32K and 128K). Intervals add "
        "the changes of all parameters in squares.</p>" + _changes(found["changes"])
    )


def _changes(changes: Sequence[dict[str, Any]]) -> str:
    keys = [key for key in changes[0] if key not in ("parameter", "value")]
    rows = "".join(
        f"<tr><td>{_text(c['parameter'])}</td><td class=n>{number(c['value'])}</td>"
        + "".join(f"<td class=n>{c[k]:+.1%}</td>" for k in keys)
        + "</tr>"
        for c in changes
    )
    return _table(("parameter", "at", *(WORDS.get(k, k) for k in keys)), rows)


def _table(header: Sequence[str], rows: str, caption: str = "") -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    return f"<table>{caption}<tr>{head}</tr>{rows}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))
