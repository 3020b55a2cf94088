"""What `--json` prints: one object, its schema_version first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
"""Of everything that a verb prints as JSON; a field that changes its meaning raises it."""


def json_text(values: Mapping[str, Any]) -> str:
    """The object as indented JSON, without a newline at its end."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2)
