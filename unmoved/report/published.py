"""Published numbers, with their sources: one data file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def published() -> dict[str, Any]:
    """sources, statistics (of the paper's tables), returns: see `about` in the file."""
    return dict(json.loads((Path(__file__).parent / "published.json").read_text()))


def table_one() -> dict[str, dict[str, float]]:
    """Table 1 by method and statistic: walker_run, preset drq, 500k frames, 5 seeds."""
    out: dict[str, dict[str, float]] = {}
    for entry in published()["statistics"]:
        if entry["table"] == "Table 1":
            out.setdefault(entry["method"], {})[entry["statistic"]] = entry["value"]
    return out
