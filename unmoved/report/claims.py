"""The paper's claims, each judged on the runs at hand: held, not held, undecided, or not tested."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from unmoved.report.panels import Mean, Panel, statistic
from unmoved.report.runs import Record

FOUR = ("critic_loss_std", "target_std", "actor_loss_std_across_batch", "kl_author")


@dataclass(frozen=True)
class Comparison:
    """Whether low < high, as the claim says it is."""

    what: str
    low: Mean
    high: Mean
    frames: float

    @property
    def verdict(self) -> str:
        gap, error = self.high.value - self.low.value, math.hypot(self.low.error, self.high.error)
        if math.isnan(error) or abs(gap) < 2 * error:
            return "undecided"
        return "held" if gap > 0 else "not held"

    def __str__(self) -> str:
        sign = "<" if self.low.value < self.high.value else "≥"
        return f"{self.what}: {self.low.value:.3g} {sign} {self.high.value:.3g}"


@dataclass(frozen=True)
class Verdict:
    id: str
    claim: str
    verdict: str
    evidence: list[str] = field(default_factory=list)
    seeds: str = "-"
    frames: str = "-"


class Evidence:
    """Looks up arms by preset, task, method and settings, exactly."""

    def __init__(self, records: list[Record], panels: list[Panel]) -> None:
        self.records, self.panels = records, panels

    def arm(self, preset: str, task: str, method: str, **settings: object) -> list[Record]:
        return [
            r for r in self.records
            if r.panel == (preset, task) and r.config.method == method and r.settings == settings
        ]  # fmt: skip

    def tasks(self, preset: str) -> list[str]:
        return sorted({r.config.task for r in self.records if r.config.preset == preset})

    def below(self, names: tuple[str, ...], low: str, high: str, preset: str = "drq") -> list[Comparison]:
        """statistic(low) < statistic(high), on every task that has both."""
        out = []
        for task in self.tasks(preset):
            a, b = self.arm(preset, task, low), self.arm(preset, task, high)
            for name in names:
                out += self.compare(f"{task} {name}, {low} < {high}", a, b, name)
        return out

    def compare(self, what: str, low: list[Record], high: list[Record], name: str) -> list[Comparison]:
        x, y = statistic(low, name), statistic(high, name)
        if x is None or y is None:
            return []
        at = min(x[1], y[1])
        x, y = statistic(low, name, at), statistic(high, name, at)
        return [Comparison(what, x[0], y[0], at)] if x and y else []

    def returns(
        self, what: str, low: list[Record], high: list[Record], background: str, last: int = 1
    ) -> list[Comparison]:
        """return(low) < return(high)."""
        for p in self.panels:
            if low and high and (p.preset, p.task, p.background) == (*low[0].panel, background):
                by_folder = {
                    r.folder: v for g in p.groups for r, v in zip(p.groups[g], p.returns(g, last), strict=True)
                }
                x, y = ([by_folder[r.folder] for r in side if r.folder in by_folder] for side in (low, high))
                if x and y:
                    return [Comparison(what, Mean.of(x), Mean.of(y), p.frames)]
        return []


def conclude(id: str, claim: str, comparisons: list[Comparison]) -> Verdict:
    if not comparisons:
        return Verdict(id, claim, "not tested")
    verdicts = {c.verdict for c in comparisons}
    verdict = "not held" if "not held" in verdicts else "undecided" if "undecided" in verdicts else "held"
    n = sorted({m.n for c in comparisons for m in (c.low, c.high)})
    at = sorted({c.frames for c in comparisons})
    return Verdict(
        id, claim, verdict, [f"{c} ({c.verdict})" for c in comparisons],
        str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}",
        f"{at[0]:,.0f}" if len(at) == 1 else f"{at[0]:,.0f} to {at[-1]:,.0f}",
    )  # fmt: skip


def early_kl(e: Evidence) -> list[Comparison]:
    """At the first record after the random actions in which both have a KL."""
    out = []
    for task in e.tasks("drq"):
        low, high = e.arm("drq", task, "drq_kl"), e.arm("drq", task, "drq")
        frames = [
            row["frames"] for r in low + high for row in r.diagnostics if row.get("kl_author") and row["frames"] > 0
        ]
        if low and high and frames:
            at = min(frames)
            x, y = statistic(low, "kl_author", at), statistic(high, "kl_author", at)
            if x and y:
                out.append(Comparison(f"{task} KL at {at:,} frames, drq_kl < drq", x[0], y[0], at))
    return out


def invariance(e: Evidence) -> list[Comparison]:
    up = tuple(f"cosine_{head}_shift" for head in ("actor", "critic"))
    return e.below(up, "drq", "ours") + e.below(("tsne_actor", "tsne_critic"), "ours", "drq")


def at_least_as_good(e: Evidence) -> list[Comparison]:
    out = []
    for preset, rivals in (("drq", ("rad", "drq", "drac", "svea")), ("drqv2", ("drqv2",))):
        for task in e.tasks(preset):
            for rival in rivals:
                low, high = e.arm(preset, task, rival), e.arm(preset, task, "ours")
                out += e.returns(f"{preset} {task} return, {rival} < ours", low, high, "train")
    return out


def unseen_scenes(e: Evidence) -> list[Comparison]:
    out = []
    for task in e.tasks("dmgb"):
        low, high = e.arm("dmgb", task, "svea"), e.arm("dmgb", task, "ours")
        out += e.returns(f"{task} last 15 in video_hard, svea < ours", low, high, "video_hard", last=15)
    return out


def conv_in_target(e: Evidence) -> list[Comparison]:
    out = []
    for task in e.tasks("dmgb"):
        plain = e.arm("dmgb", task, "svea", strong="conv")
        inside = e.arm("dmgb", task, "svea", strong="conv", strong_in_target=True)
        out += e.compare(f"{task} bias_mse, without < with conv in the target", plain, inside, "bias_mse")
        variance, mean = statistic(inside, "target_variance"), statistic(inside, "target_mean")
        if variance and mean:
            out.append(Comparison(f"{task} variance < mean of the target", variance[0], mean[0], variance[1]))
    return out


def more_updates(e: Evidence) -> list[Comparison]:
    out = []
    for task in e.tasks("dmgb"):
        for strong in ("conv", "rotate"):
            few = e.arm("dmgb", task, "svea", strong=strong, strong_in_target=True)
            many = e.arm("dmgb", task, "svea", strong=strong, strong_in_target=True, updates_per_step=4)
            out += e.returns(f"{task} return, {strong} in target, 1 < 4 updates", few, many, "train")
    return out


def no_harm(e: Evidence) -> Verdict:
    """No harm: not lower by two standard errors."""
    found = []
    for task in e.tasks("dmgb"):
        for strong, plain in (
            ("overlay", e.arm("dmgb", task, "svea")),
            ("blur", e.arm("dmgb", task, "svea", strong="blur")),
        ):
            settings = {"strong_in_target": True} | ({} if strong == "overlay" else {"strong": strong})
            inside = e.arm("dmgb", task, "svea", **settings)
            found += e.returns(f"{task} return, {strong} in the target < not", inside, plain, "train")
    verdict = conclude("C12", "Overlay and blur in the target do no harm.", found)
    flipped = {"held": "not held", "not held": "held"}.get(verdict.verdict, verdict.verdict)
    return Verdict(verdict.id, verdict.claim, flipped, verdict.evidence, verdict.seeds, verdict.frames)


def second_argument(e: Evidence) -> list[Comparison]:
    out = []
    for task in e.tasks("drq"):
        low, high = e.arm("drq", task, "drq_kl", kl_stop="second"), e.arm("drq", task, "drq_kl")
        out += e.returns(f"{task} return, stop second < stop first", low, high, "train")
    return out


CLAIMS: tuple[tuple[str, str, Callable[[Evidence], list[Comparison]]], ...] = (
    ("C1", "RAD+ and DrQ lie below RAD in the spread of the critic's loss and of the target.",
     lambda e: e.below(FOUR[:2], "rad_plus", "rad") + e.below(FOUR[:2], "drq", "rad")),
    ("C2", "The KL term lowers the KL and the spread of the target and of the actor's loss.",
     lambda e: e.below(FOUR[1:], "drq_kl", "drq")),
    ("C3", "A moving KL target beats the fixed one in all four columns.",
     lambda e: e.below(FOUR, "drq_kl", "drq_kl_fixed")),
    ("C4", "Tangent prop lowers the spread of the critic's loss.", lambda e: e.below(FOUR[:1], "ours", "drq_kl")),
    ("C5", "The KL term acts from the start of training.", early_kl),
    ("C6", "The features of ours are more invariant.", invariance),
    ("C7", "Ours is at least as good as RAD, DrQ, DrAC, SVEA and DrQ-v2.", at_least_as_good),
    ("C8", "Ours is above SVEA in video_hard on every task.", unseen_scenes),
    ("C9", "Ours lies below SVEA in the spread of critic's loss and target, and in the KL.",
     lambda e: e.below((*FOUR[:2], FOUR[3]), "ours", "svea", "dmgb")),
    ("C10", "Conv in the target: a variance small against the mean, a larger final bias.", conv_in_target),
    ("C11", "More updates repair conv and rotation in the target.", more_updates),
    ("C13", "Stop-gradient on the second argument of the KL trains worse.", second_argument),
)  # fmt: skip


def judge(records: list[Record], panels: list[Panel]) -> list[Verdict]:
    evidence = Evidence(records, panels)
    verdicts = [conclude(id, claim, find(evidence)) for id, claim, find in CLAIMS]
    verdicts.append(no_harm(evidence))
    return sorted(verdicts, key=lambda v: int(v.id[1:]))
