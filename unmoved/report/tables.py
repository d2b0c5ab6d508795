"""Tables of a report, and their files: Markdown, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmoved import stats
from unmoved.report.claims import Verdict
from unmoved.report.panels import Mean, Panel, Suite, labels_of, statistic
from unmoved.report.published import published
from unmoved.report.runs import Record, Runs, last_mean, maximum_return

STATISTICS = {
    "critic_loss_std": "std of critic loss",
    "target_std": "std of target",
    "actor_loss_std_across_batch": "std of actor loss, across states",
    "kl_author": "KL, authors' units",
    "target_mean": "mean of target",
    "target_variance": "variance of target",
    "bias_mse": "bias of target, mean square",
}


@dataclass(frozen=True)
class Table:
    name: str  # of its files
    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        def line(cells: list[str]) -> str:
            return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

        rule = "|" + "---|" * len(self.columns)
        return "\n".join(
            [f"## {self.title}", "", self.caption, "", line(self.columns), rule, *map(line, self.rows), ""]
        )

    def csv(self) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.columns, *self.rows])
        return out.getvalue()

    def latex(self) -> str:
        def line(cells: list[str]) -> str:
            return " & ".join(map(latex_text, cells)) + r" \\"

        return "\n".join([
            r"\begin{table}", r"\centering", rf"\caption{{{latex_text(self.title)}. {latex_text(self.caption)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}", r"\hline", line(self.columns), r"\hline",
            *map(line, self.rows), r"\hline", r"\end{tabular}", r"\end{table}", "",
        ])  # fmt: skip

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in (("md", self.markdown()), ("csv", self.csv()), ("tex", self.latex())):
            (folder / f"{self.name}.{suffix}").write_text(content)

    def write_csv(self, folder: Path) -> None:
        (folder / f"{self.name}.csv").write_text(self.csv())


def latex_text(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
               "≥": r"$\geq$", "<": r"$<$", ">": r"$>$"}  # fmt: skip
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def slug(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", "_".join(words).lower()).strip("_")


# ------------------------------------------------------------------------------------------------ returns


def score_tables(panels: list[Panel]) -> list[Table]:
    """One per preset and background: mean and standard deviation over seeds."""
    out = []
    for preset, background in dict.fromkeys((p.preset, p.background) for p in panels):
        here = [p for p in panels if (p.preset, p.background) == (preset, background)]
        labels = labels_of(here)
        rows = []
        for p in here:
            cells = [Mean.of(p.returns(label)).text() if label in p.groups else "" for label in labels]
            rows.append([p.task, f"{p.frames:,.0f}", *cells])
        clips = ", ".join(sorted({p.clips for p in here} - {""}))
        where = f"{background}" + (f", clips: {clips}" if clips else "")
        episodes = " or ".join(sorted({p.episodes for p in here}))
        caption = (
            f"Background {where}. Return of the last evaluation at or before these frames ({episodes} episodes), mean "
            "± standard deviation over seeds (number of seeds)."
        )
        title = f"Returns, {preset}, {background}"
        out.append(Table(slug("returns", preset, background), title, caption, ["task", "frames", *labels], rows))
    return out


def aggregate_tables(suites: list[Suite]) -> list[Table]:
    out = []
    for k, s in enumerate(suites, 1):
        rows = []
        for label, scores in s.scores.items():
            cells = [str(stats.interval(statistic, scores)) for statistic in stats.AGGREGATES.values()]
            rows.append([label, str(sum(map(len, scores))), *cells])
        caption = (
            f"{', '.join(s.tasks)}; background {s.scene}; at {s.frames} frames; {s.runs} seeds per task. Score: return "
            "/ maximum. 95 % stratified bootstrap intervals, where every task has two seeds or more."
        )
        columns = ["method", "runs", *stats.AGGREGATES]
        out.append(
            Table(
                slug("aggregate", s.preset, s.background, str(k)),
                f"Aggregate scores: {s.title}",
                caption,
                columns,
                rows,
            )
        )
        out += improvement_table(s, k)
    return out


def improvement_table(s: Suite, k: int) -> list[Table]:
    first = next((label for label in s.scores if label == "ours"), None)
    if first is None:
        return []
    rows = [
        [label, str(stats.improvement_interval(s.scores[first], scores))]
        for label, scores in s.scores.items()
        if label != first
    ]
    caption = (
        f"P(a run of {first} scores above a run of the other), ties half, averaged over tasks; {s.runs} seeds per "
        f"task, at {s.frames} frames, background {s.scene}. 0.5: no difference."
    )
    name = slug("improvement", s.preset, s.background, str(k))
    return [Table(name, f"Probability of improvement: {s.title}", caption, ["over", f"{first} better"], rows)]


def published_returns(panels: list[Panel]) -> list[Table]:
    """Ours beside every published number for the same preset, method, task and background."""
    rows = []
    sources = published()["sources"]
    used = []
    for entry in published()["returns"]:
        for p in panels:
            if (p.preset, p.task, p.background) != (entry["preset"], entry["task"], entry["background"]):
                continue
            records = [r for g in p.groups.values() for r in g if r.config.method == entry["method"] and not r.settings]
            records = [r for r in records if r.curves[p.background].frames[-1] >= entry["frames"]]
            if not records:
                continue
            used.append(entry["source"])
            mine = Mean.of(last_mean(r, p.background, entry["frames"], entry["evaluations"]) for r in records)
            at = f"{entry['frames']:,}" + (f", last {entry['evaluations']}" if entry["evaluations"] > 1 else "")
            theirs = f"{entry['value']:g} ± {entry['spread']:g} ({entry['seeds']})"
            rows.append([p.task, f"{p.preset}/{entry['method']}", p.scene, at, mine.text(), theirs, entry["source"]])
    if not rows:
        return []
    about = " ".join(f"{s}: {sources[s]['name']}. {sources[s]['note']}" for s in dict.fromkeys(used))
    caption = f"Return, mean ± standard deviation over seeds (number of seeds). {about}"
    columns = ["task", "recipe", "background", "frames", "ours here", "published", "source"]
    return [Table("published_returns", "Returns beside published ones", caption, columns, rows)]


# ------------------------------------------------------------------------------------------------ statistics


def published_statistics(records: list[Record]) -> list[Table]:
    """The paper's tables 1, 3, 4 and 5 in its own form, ours above the print."""
    here: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))  # table, row, column
    for entry in published()["statistics"]:
        same = [
            r for r in records
            if r.panel == (entry["preset"], entry["task"]) and r.config.method == entry["method"]
            and r.settings == entry["settings"]
        ]  # fmt: skip
        found = statistic(same, entry["statistic"], entry["frames"])
        if found is None:
            continue
        mine, at = found
        arm = entry["method"] + "".join(f", {k.replace('_', ' ')} {v}" for k, v in entry["settings"].items())
        column = column_name(entry)
        here[entry["table"]][f"{arm}, here"][column] = f"{mine.text(3)} at {at:,.0f}"
        spread = f" ± {entry['spread']:g}" if "spread" in entry else ""
        here[entry["table"]][f"{arm}, paper"][column] = f"{entry['value']:g}{spread} (5) at {entry['frames']:,}"
    out = []
    for name, rows in here.items():
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        cells = [[row, *(cells.get(column, "") for column in columns)] for row, cells in rows.items()]
        setting = next(f"{e['preset']}/{e['task']}" for e in published()["statistics"] if e["table"] == name)
        caption = f"{setting}. Mean ± standard deviation over seeds (number of seeds) at simulator frames."
        out.append(Table(slug("paper", name), f"{name} of the paper", caption, ["method", *columns], cells))
    return out


def column_name(entry: dict[str, Any]) -> str:
    """Table 4's cosine under each arm's own strong transformation is one column; Table 5 has one per 100k frames."""
    name = str(entry["statistic"])
    if name.startswith("cosine_") and not name.endswith("_shift"):
        return f"cosine {name.split('_')[1]}, strong"
    words = STATISTICS.get(name, name.replace("_", " "))
    return f"{words}, {entry['frames'] // 1000}k" if entry["table"] == "Table 5" else words


def statistics_tables(runs: Runs) -> list[Table]:
    """Every recorded statistic of the tables, at the last common frames."""
    rows = []
    names = [*STATISTICS, "cosine_actor_shift", "cosine_critic_shift", "tsne_actor", "tsne_critic", "tangent_norm"]
    for (preset, task, label), group in runs.groups().items():
        found = {name: statistic(group, name) for name in names}
        if not any(found.values()):
            continue
        at = sorted({f"{v[1]:,.0f}" for v in found.values() if v})
        cells = [v[0].text(3) if v else "" for v in found.values()]
        rows.append([f"{preset}/{task}", label, " / ".join(at), *cells])
    kept = [i for i in range(len(names)) if any(row[3 + i] for row in rows)]
    if not rows:
        return []
    columns = ["task", "method", "frames", *(STATISTICS.get(names[i], names[i].replace("_", " ")) for i in kept)]
    shown = [[*row[:3], *(row[3 + i] for i in kept)] for row in rows]
    caption = (
        "From diagnostics.jsonl, under the weak transformation; mean ± standard deviation over seeds (their number)."
    )
    return [Table("statistics", "Statistics at the end", caption, columns, shown)]


# ------------------------------------------------------------------------------------------------ the rest


def speed_table(runs: Runs) -> Table:
    rows = []
    for (preset, task, label), group in runs.groups().items():
        speed = Mean.of(r.frames_per_second for r in group)
        hours = Mean.of(max(c.seconds[-1] for c in r.curves.values()) / 3600 for r in group)
        machines = ", ".join(sorted({r.machine for r in group}))
        rows.append([f"{preset}/{task}", label, speed.text(0), hours.text(2), machines])
    caption = (
        "Simulator frames per second of training time, evaluations included, and hours trained; mean ± std (seeds)."
    )
    return Table("speed", "Wall-clock", caption, ["task", "method", "frames/s", "hours", "machine"], rows)


def configuration_table(runs: Runs) -> Table:
    """Fields in which the runs of this report differ, by preset and label."""
    by_arm: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    losses: dict[tuple[str, str], str] = {}
    for (preset, _, label), group in runs.groups().items():
        by_arm[preset, label] += [r.config.to_json() for r in group]
        recipe = group[0].folder / "recipe.txt"
        losses[preset, label] = recipe.read_text(errors="replace").strip() if recipe.is_file() else "-"
    hidden = {"task", "method", "preset", "seed", "runs", "video", "tensorboard", "eval_workers", "checkpoint_every"}
    everything = [config for configs in by_arm.values() for config in configs]
    names = [k for k in everything[0] if k not in hidden and len({json.dumps(c.get(k)) for c in everything}) > 1]
    rows = []
    for (preset, label), configs in by_arm.items():
        values = [", ".join(dict.fromkeys(text(c.get(k)) for c in configs)) for k in names]
        rows.append([preset, label, losses[preset, label], *values])
    caption = (
        "The losses, and the settings that are not the same in all runs of this report; several values where tasks or "
        "seeds differ."
    )
    return Table("configuration", "Configuration differences", caption, ["preset", "method", "losses", *names], rows)


def text(value: Any) -> str:
    return "-" if value is None else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def claims_table(verdicts: list[Verdict]) -> Table:
    rows = [[v.id, v.claim, v.verdict, v.seeds, v.frames, "; ".join(v.evidence) or "-"] for v in verdicts]
    caption = (
        "held: every comparison goes the claim's way by two standard errors over seeds or more; not held: one goes the "
        "other way by as much; undecided: a difference is smaller, or there is one seed; not tested: no such runs here."
    )
    return Table(
        "claims", "The paper's claims", caption, ["", "claim", "verdict", "seeds", "frames", "comparisons"], rows
    )


def runs_table(runs: Runs) -> Table:
    rows = []
    for r in (r for group in runs.groups().values() for r in sorted(group, key=lambda r: r.config.seed)):
        for background, c in r.curves.items():
            scene = f"{background} ({c.clips})" if c.clips else background
            rows.append([r.config.preset, r.config.task, r.label, str(r.config.seed), scene, f"{c.frames[-1]:,.0f}",
                         f"{r.config.frames:,}", f"{c.score[-1]:.1f}", str(c.episodes)])  # fmt: skip
    columns = ["preset", "task", "method", "seed", "background", "frames", "of", "last return", "episodes"]
    return Table("runs", "Every run", "The last evaluation of each.", columns, rows)


def left_out_table(runs: Runs) -> Table:
    rows = [["left out", path, why] for path, why in runs.left_out] + [["note", path, why] for path, why in runs.notes]
    unknown = sorted({r.config.task for r in runs.records if maximum_return(r.config.task) is None})
    rows += [["note", task, "its maximum return is not known: it is in no aggregate score"] for task in unknown]
    return Table(
        "left_out", "Left out, and notes", "", ["", "what", "why"], rows or [["-", "-", "nothing was left out"]]
    )


def curve_table(panels: list[Panel]) -> Table:
    """Every point of every curve, for one's own plots."""
    rows = []
    for p in panels:
        for label, group in p.groups.items():
            for r in group:
                c = r.curves[p.background]
                for f, s, v in zip(c.frames, c.seconds, c.score, strict=True):
                    rows.append([p.preset, p.task, label, str(r.config.seed), p.background, c.clips, f"{f:.0f}",
                                 f"{f / r.config.action_repeat:.0f}", f"{s:.1f}", f"{v:.4f}"])  # fmt: skip
    columns = ["preset", "task", "method", "seed", "background", "clips", "frames", "steps", "seconds", "return"]
    return Table("curves", "Curves", "", columns, rows)
