"""`unmoved report RUNS -o DIR`: tables, figures and one page of what was trained, from the run folders' files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unmoved.config import Count
from unmoved.errors import UserError


@dataclass(frozen=True)
class ReportArgs:
    """Tables (Markdown, CSV, LaTeX), figures (PNG, SVG) and one HTML page of all runs under a folder."""

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report")
    """Folder to write."""
    frames: Count | None = None
    """Compare at these simulator frames; runs that have not reached them are left out and named. By default each task
    is compared at the last evaluation that all its runs have."""
    reference: tuple[Path, ...] = ()
    """CSV files of published curves in DrQ's or DrQ-v2's form, laid over ours."""
    title: str = "Runs of unmoved"


def report(args: ReportArgs) -> Path:
    """Write the report; returns the page."""
    import matplotlib

    matplotlib.use("Agg")
    from unmoved.log import console
    from unmoved.report import figures, tables
    from unmoved.report.claims import judge
    from unmoved.report.missing import missing_table
    from unmoved.report.page import Section, find_videos, write_page
    from unmoved.report.panels import make_panels, make_suites
    from unmoved.report.references import read_reference
    from unmoved.report.runs import read_runs

    references = [r for path in args.reference for r in read_reference(path)]
    with console.status("reading runs") as status, matplotlib.rc_context(figures.LOOK):
        runs = read_runs(args.runs)
        if not runs.records:
            why = f": {runs.left_out[0][0]}: {runs.left_out[0][1]}" if runs.left_out else ""
            raise UserError(f"there is no run with an evaluation under {args.runs}{why}")
        panels = make_panels(runs, args.frames)
        if not panels:
            raise UserError(f"no run under {args.runs} has reached {args.frames:,} frames")
        suites = make_suites(panels)
        looks, folder = figures.styles(runs.labels()), args.output / "figures"
        status.update("drawing")
        sections = [
            Section(
                "Learning curves", figures.curve_figures(panels, looks, references, folder), tables.score_tables(panels)
            ),
            Section(
                "Aggregate scores", figures.aggregate_figures(suites, looks, folder), tables.aggregate_tables(suites)
            ),
            Section("Generalisation", figures.background_figures(panels, looks, folder), []),
            Section(
                "Statistics and invariance",
                figures.statistics_figures(runs, looks, folder),
                [*tables.statistics_tables(runs), *tables.published_statistics(runs.records)],
            ),
            Section("Beside published returns", [], tables.published_returns(panels)),
            Section("Claims", [], [tables.claims_table(judge(runs.records, panels))]),
            Section("Videos", [], [], find_videos(runs)),
            Section("Wall-clock", [], [tables.speed_table(runs)]),
            Section("Configuration", [], [tables.configuration_table(runs)]),
            Section("Missing and left out", [], [missing_table(runs), tables.left_out_table(runs)]),
            Section("Runs", [], [tables.runs_table(runs)]),
        ]
        sections = [s for s in sections if s.figures or s.tables or s.videos]
        status.update("writing")
        for section in sections:
            for table in section.tables:
                table.write(args.output / "tables")
        tables.curve_table(panels).write_csv(args.output / "tables")
        page = write_page(args.output / "index.html", args.title, runs, panels, sections)
    for path, why in runs.left_out:
        console.print(f"left out: {path}: {why}", markup=False, soft_wrap=True)
    console.print(f"{len(runs.records)} runs: {page}", soft_wrap=True)
    return page
