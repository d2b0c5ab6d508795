"""One HTML page without a single address in it: pictures and videos are inside."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

import unmoved
from unmoved.report.figures import Figure
from unmoved.report.panels import Panel
from unmoved.report.runs import Runs
from unmoved.report.tables import Table, slug

MOST_VIDEOS, MOST_BYTES = 12, 3_000_000


@dataclass(frozen=True)
class Video:
    path: Path
    caption: str


@dataclass(frozen=True)
class Section:
    title: str
    figures: list[Figure]
    tables: list[Table]
    videos: list[Video] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return slug(self.title)


def find_videos(runs: Runs) -> list[Video]:
    """The newest video of each arm's first seed, in each background: what fits."""
    out = []
    for (preset, task, label), group in runs.groups().items():
        record = min(group, key=lambda r: r.config.seed)
        for background in record.curves:
            suffix = "" if background == "train" else f"_{background}"
            found = [(int(p.stem.removesuffix(suffix)), p) for p in (record.folder / "video").glob(f"*{suffix}.mp4")
                     if p.stem.removesuffix(suffix).isdigit()]  # fmt: skip
            if found and max(found)[1].stat().st_size <= MOST_BYTES:
                frames, path = max(found)
                clips = record.curves[background].clips
                scene = f"{background} ({clips})" if clips else background
                seed = record.config.seed
                out.append(Video(path, f"{preset}/{task}, {label}, seed {seed}, {scene}, at {frames:,} frames"))
    if len(out) > MOST_VIDEOS:
        runs.notes.append(
            ("videos", f"the first {MOST_VIDEOS} of {len(out)} are shown; the others lie in the runs' folders")
        )
    return out[:MOST_VIDEOS]


def data_uri(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def write_page(path: Path, title: str, runs: Runs, panels: list[Panel], sections: list[Section]) -> Path:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    seeds = sorted({len(g) for g in runs.groups().values()})
    facts = {
        "runs": str(len(runs.records)),
        "methods": str(len(runs.labels())),
        "tasks": str(len({r.config.task for r in runs.records})),
        "seeds each": f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}",
        "frames in all": f"{sum(max(c.frames[-1] for c in r.curves.values()) for r in runs.records):,.0f}",
        "left out": str(len(runs.left_out)),
    }
    scenes = sorted({p.scene for p in panels})
    html = environment.get_template("page.html").render(
        title=title, facts=facts, scenes=scenes, sections=sections, data_uri=data_uri, version=unmoved.__version__
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html)
    return path
