"""What a study gives: rows of published and model values, curves, and words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FITTED, SELECTED, PREDICTED = "fitted", "selected", "predicted"
ORIGINS = (PREDICTED, SELECTED, FITTED)
UNPUBLISHED = "no published value"
"""Fitted: the value was used to choose a parameter. Selected: no parameter was fitted to it, but the setting was chosen
among several by people who knew it (see emu.study.candidates). Predicted: neither."""


@dataclass(frozen=True, slots=True)
class Row:
    """One value.

    Attributes:
        quantity: what, in words.
        model: the model's value.
        unit: of both values.
        published: None where there is none (or we could not read it).
        tolerance: relative error up to which the value counts as met.
        origin: FITTED, SELECTED, PREDICTED or UNPUBLISHED.
        low, high: the prediction's interval, None where no parameter's range matters.
        limits: published as a range: the model's value is met anywhere in it, or as near to it as the tolerance says.
        reason: why it is missed, where it is.
    """

    quantity: str
    model: float
    unit: str
    published: float | None = None
    tolerance: float = 0.15
    origin: str = UNPUBLISHED
    low: float | None = None
    high: float | None = None
    limits: tuple[float, float] | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative, against the published value."""
        return None if self.published is None else self.model / self.published - 1

    @property
    def met(self) -> bool | None:
        """Within the tolerance, or the limits; None without a published value."""
        if self.limits is not None:
            low, high = self.limits
            return low * (1 - self.tolerance) <= self.model <= high * (1 + self.tolerance)
        error = self.error
        return None if error is None else abs(error) <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Plain data, with error and verdict."""
        values = {k: _rounded(v) for k, v in asdict(self).items() if k != "limits"}
        limits = None if self.limits is None else list(self.limits)
        return {**values, "limits": limits, "error": _rounded(self.error), "met": self.met}


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot.

    Attributes:
        label: for the legend.
        x, y: the points.
        published: a published curve or mark, drawn apart.
        panel: which of the plot's panels.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    published: bool = False
    panel: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes of a plot.

    Attributes:
        title, xlabel, ylabel: texts.
        logx, logy: scales.
    """

    title: str
    xlabel: str
    ylabel: str
    logx: bool = False
    logy: bool = False


@dataclass(frozen=True, slots=True)
class Study:
    """One published figure.

    Attributes:
        id: for the command line.
        title: what the figure shows.
        text: what one sees, for someone who has not read the paper.
        rows, curves, panels: its contents.
        parameters: "sac", "xm-sparse" or "beluga": the one parameter set it uses.
    """

    id: str
    title: str
    text: str
    parameters: str
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    panels: tuple[Panel, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "id": self.id,
            "title": self.title,
            "parameters": self.parameters,
            "text": self.text,
            "rows": [row.to_json() for row in self.rows],
            "curves": [
                {
                    "label": c.label,
                    "panel": c.panel,
                    "published": c.published,
                    "x": list(c.x),
                    "y": [_rounded(y) for y in c.y],
                }
                for c in self.curves
            ],
        }


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
