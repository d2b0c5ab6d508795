"""The paper's case study (Table B) over several diagnosed runs, and whether its orderings hold in them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from unmoved.log import console
from unmoved.report.published import table_one

# Statistic, its name in Table B, and the paper's values there (walker_run, 500k frames).
COLUMNS = {
    "critic_loss_std": "std critic loss",
    "target_std": "std target Q",
    "actor_loss_std_across_batch": "std actor loss",
    "kl_author": "KL",
    "cosine_actor_shift": "cosine, actor",
    "cosine_critic_shift": "cosine, critic",
}
FOUR = tuple(COLUMNS)[:4]
PAPER = {method: tuple(row[name] for name in FOUR) for method, row in table_one().items()}


@dataclass(frozen=True)
class Claim:
    """statistic of `low` < factor x statistic of `high`."""

    label: str
    low: str
    high: str
    statistic: str
    factor: float = 1.0


CLAIMS = (
    *(Claim("more samples, less variance", m, "rad", s) for m in ("rad_plus", "drq") for s in FOUR[:2]),
    *(Claim("the KL term at least halves the KL", m, "drq", "kl_author", 0.5) for m in ("drq_kl", "ours")),
    *(Claim("the KL term lowers variance", "drq_kl", "drq", s) for s in FOUR[1:3]),
    *(Claim("a moving KL target beats the fixed one", "drq_kl", "drq_kl_fixed", s) for s in FOUR),
    Claim("tangent prop lowers the critic loss's", "ours", "drq_kl", "critic_loss_std"),
    Claim("tangent prop does not raise the KL", "ours", "drq_kl", "kl_author", 1.1),
    *(Claim("ours has the more invariant features", "drq", "ours", s) for s in tuple(COLUMNS)[4:]),
)


@dataclass(frozen=True)
class Mean:
    value: float
    error: float  # over seeds, or over states where there is one run
    runs: int


def means(rows: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Mean]]:
    """By method and statistic, from (method, row of `diagnose`)."""
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for method, row in rows:
        by_method[method].append(row)
    out: dict[str, dict[str, Mean]] = {}
    for method, group in by_method.items():
        out[method] = {}
        for name in COLUMNS:
            values = [row[name] for row in group if row.get(name) is not None]
            if not values:
                continue
            mean, n = sum(values) / len(values), len(values)
            if n > 1:
                error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
            else:
                error = group[0][f"{name}_se"]
            out[method][name] = Mean(mean, error, n)
    return out


def judge(claim: Claim, found: dict[str, dict[str, Mean]]) -> str | None:
    """held, not held, or within two standard errors; None where a method is missing."""
    low, high = (found.get(m, {}).get(claim.statistic) for m in (claim.low, claim.high))
    if low is None or high is None:
        return None
    gap = claim.factor * high.value - low.value
    if abs(gap) < 2 * math.hypot(low.error, claim.factor * high.error):
        return "within error"
    return "held" if gap > 0 else "not held"


def compare(rows: list[tuple[str, dict[str, Any]]], setting: str) -> None:
    """Print the table and the claims that these runs can speak about."""
    from rich.table import Table

    found = means(rows)
    table = Table(box=None, pad_edge=False, title=setting, title_justify="left", title_style="bold")
    table.add_column("method", header_style="bold")
    table.add_column("runs", header_style="bold")
    for label in COLUMNS.values():
        table.add_column(label, header_style="bold", justify="right")
    for method, statistics in found.items():
        shown = [f"{m.value:.3f} ± {m.error:.3f}" if (m := statistics.get(name)) else "" for name in COLUMNS]
        table.add_row(method, str(max(m.runs for m in statistics.values())), *shown)
    for method in found:
        if method in PAPER:
            table.add_row(f"[dim]{method}, paper[/]", "", *(f"[dim]{v:.3f}[/]" for v in PAPER[method]))
    console.print(table)
    console.print("[dim]paper: walker_run, drq preset, 500k frames, 5 seeds[/]")
    verdicts = Table(box=None, pad_edge=False)
    for column in ("the paper's ordering", "", "here"):
        verdicts.add_column(column, header_style="bold")
    for claim in CLAIMS:
        verdict = judge(claim, found)
        if verdict is not None:
            factor = "" if claim.factor == 1 else f"{claim.factor:g} x "
            ordering = f"{COLUMNS[claim.statistic]}: {claim.low} < {factor}{claim.high}"
            verdicts.add_row(claim.label, ordering, verdict)
    if verdicts.row_count:
        console.print(verdicts)
