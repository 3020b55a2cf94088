"""A media profile from measurements: what was not measured comes from a base profile, with its source."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.timing.profile import Figure, LinkModel
from emu.timing.profile_file import load_media

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.calibrate.measured import Measured


def media_profile(
    name: str, base: str, measured: Sequence[Measured], source: str, date: str
) -> str:
    """The TOML text of a media profile that emu loads.

    Figures measured several times become the mean of the values, with the interval of all.

    Raises:
        UserError: nothing was measured, or no source.
    """
    if not measured:
        raise UserError("nothing was measured", remedy="give a measurement's output")
    if not source.strip() or not date.strip():
        raise UserError(
            "a profile's numbers name their source and date", remedy="give --source and --date"
        )
    model = load_media(base).model
    lines = [f"description = {_quoted(f'{name}, measured; the rest as in {base}')}"]
    for field in fields(LinkModel):
        same = [m for m in measured if m.field == field.name]
        figure: Figure = getattr(model, field.name)
        if same:
            figure = _figure(same, source, date)
        elif field.name == "write_gb_per_s" and any(m.field == "read_gb_per_s" for m in measured):
            reads = [m for m in measured if m.field == "read_gb_per_s"]
            figure = _figure(reads, source, date, "taken from reads; writes were not measured; ")
        lines.append(
            f"{field.name} = {{ value = {figure.value:.6g}, source = {_quoted(figure.source)}, "
            f"date = {_quoted(figure.date)}, note = {_quoted(figure.note)} }}"
        )
    return "\n".join(lines) + "\n"


def _figure(same: Sequence[Measured], source: str, date: str, prefix: str = "") -> Figure:
    value = sum(m.value for m in same) / len(same)
    low, high = min(m.low for m in same), max(m.high for m in same)
    how = "; ".join(dict.fromkeys(m.how for m in same))
    return Figure(value, source, date, f"{prefix}interval {low:.6g} .. {high:.6g}; {how}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
