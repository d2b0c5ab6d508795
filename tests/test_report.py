"""The report: its numbers by hand, what it leaves out, and the page in a browser."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import write_rows, write_run

from unmoved.config import make_config
from unmoved.errors import UserError
from unmoved.log import write_video
from unmoved.report import ReportArgs, report
from unmoved.report.claims import Comparison, conclude, judge
from unmoved.report.missing import missing_table
from unmoved.report.panels import Mean, make_panels, make_suites, statistic
from unmoved.report.published import published, table_one
from unmoved.report.references import read_reference
from unmoved.report.runs import read_runs
from unmoved.report.tables import Table, aggregate_tables, published_returns, published_statistics, score_tables


def evaluations(folder: Path, scores: list[float], every: int = 100, **more: Any) -> None:
    """Rows at 0, every, 2 every, … frames of action repeat 2."""
    write_rows(folder / "eval.jsonl", [
        {"frames": every * i, "steps": every * i // 2, "seconds": float(i), "background": "train", "episodes": 10,
         "return_mean": s, "return_std": 0.0, **more} for i, s in enumerate(scores)
    ])  # fmt: skip


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, two tasks, three seeds; statistics on one task; SVEA and ours in another scene."""
    runs = tmp_path_factory.mktemp("ablation")
    for seed in (1, 2, 3):
        for method in ("rad", "drq", "ours"):
            write_run(runs, "walker_run", method=method, seed=seed, diagnostics=True)
            write_run(runs, "cheetah_run", method=method, seed=seed)
        for method in ("svea", "ours"):
            write_run(runs, "walker_walk", preset="dmgb", method=method, seed=seed)
    write_run(runs / "stop_second", "walker_run", method="drq", seed=1, kl_stop="second")
    frames = [np.full((24, 24, 3), 10 * i, np.uint8) for i in range(8)]
    write_video(runs / "drq/walker_run/ours/1/video/500000.mp4", frames)
    return runs


@pytest.fixture(scope="module")
def page(ablation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(ReportArgs(ablation, tmp_path_factory.mktemp("report"), title="Two tasks & three <methods>"))


# ------------------------------------------------------------------------------------------------ numbers


def test_scores_by_hand(tmp_path: Path) -> None:
    for seed, scores in ((1, [0, 100, 300]), (2, [0, 200, 500, 900])):  # the second is longer: compared at 200 frames
        evaluations(write_run(tmp_path, method="drq", seed=seed).folder, scores)
    evaluations(write_run(tmp_path, method="ours", seed=1).folder, [0, 50, 700])
    runs = read_runs(tmp_path)
    (panel,) = make_panels(runs)
    assert panel.frames == 200 and panel.returns("drq") == [300, 500] and panel.returns("drq", last=2) == [200, 350]
    (table,) = score_tables([panel])
    assert table.columns == ["task", "frames", "drq", "ours"]
    assert table.rows == [["walker_run", "200", f"400.0 ± {math.sqrt(20000):.1f} (2)", "700.0 (1)"]]
    assert any("compared at 200 frames" in why for _, why in runs.notes)
    (suite,) = make_suites([panel])
    assert [task.tolist() for task in suite.scores["drq"]] == [[0.3, 0.5]]
    aggregate, improvement = aggregate_tables([suite])
    assert aggregate.rows[0][2].startswith("0.400 [0.300, 0.500]") and aggregate.rows[1][2] == "0.700"
    assert improvement.rows == [["drq", "1.000"]]


def test_frames_can_be_asked_for(tmp_path: Path) -> None:
    for seed, scores in ((1, [0, 100, 300]), (2, [0, 200, 500, 900])):
        evaluations(write_run(tmp_path, method="drq", seed=seed).folder, scores)
    runs = read_runs(tmp_path)
    (panel,) = make_panels(runs, 300)
    assert panel.returns("drq") == [900]
    assert runs.left_out == [(str(tmp_path / "drq/walker_run/drq/1"), "it has not reached 300 frames")]


def test_aggregates_are_over_the_same_tasks(ablation: Path) -> None:
    suites = make_suites(make_panels(read_runs(ablation)))
    of_drq = [s for s in suites if s.preset == "drq"]
    assert [(s.tasks, list(s.scores)) for s in of_drq] == [(("cheetah_run", "walker_run"), ["rad", "drq", "ours"])]
    assert {s.background for s in suites if s.preset == "dmgb"} == {"train", "video_hard"}
    for s in suites:
        assert "generated clips" in s.scene or s.background == "train"


def test_presets_and_settings_are_never_averaged(ablation: Path) -> None:
    groups = read_runs(ablation).groups()
    assert len(groups["drq", "walker_run", "drq"]) == 3
    assert len(groups["drq", "walker_run", "drq (kl stop second)"]) == 1
    assert len(groups["dmgb", "walker_walk", "ours"]) == 3 and len(groups["drq", "walker_run", "ours"]) == 3


def test_settings_that_all_share_go_unsaid(tmp_path: Path) -> None:
    for method in ("rad", "drq"):
        write_run(tmp_path, method=method, batch_size=64)
    runs = read_runs(tmp_path)
    assert runs.labels() == ["rad", "drq"]
    assert ("all of drq", "every run differs from the preset: batch size 64") in runs.notes


def test_published_numbers_stand_beside(tmp_path: Path) -> None:
    config = write_run(tmp_path, "walker_walk", method="drq", points=51, frames=500_000)
    rows = published_returns(make_panels(read_runs(tmp_path)))[0].rows
    at = {row[3]: row for row in rows}
    assert set(at) == {"100,000", "250,000", "500,000"}
    assert at["500,000"][5:] == ["897 ± 73 (10)", "drq"]
    last = json.loads((config.folder / "eval.jsonl").read_text().splitlines()[-1])
    assert at["500,000"][4] == f"{last['return_mean']:.1f} (1)"
    write_run(tmp_path / "other", "walker_walk", method="drq", points=51, batch_size=512, seed=2)
    assert len(published_returns(make_panels(read_runs(tmp_path)))[0].rows) == 3  # another setting is another thing


def test_tables_of_the_paper(tmp_path: Path) -> None:
    for seed in (1, 2):
        config = write_run(tmp_path, method="drq", seed=seed)
        last = {"frames": 500_000, "critic_loss_std": 0.2 * seed, "kl_author": None}
        write_rows(config.folder / "diagnostics.jsonl", [{"frames": 10_000, "critic_loss_std": 9.0}, last])
    (table,) = published_statistics(read_runs(tmp_path).records)
    assert table.columns == ["method", "std of critic loss"]
    assert table.rows == [
        ["drq, here", "0.300 ± 0.141 (2) at 500,000"],
        ["drq, paper", "0.358 ± 0.123 (5) at 500,000"],
    ]
    for strong in ("blur", "conv"):
        config = write_run(tmp_path / strong, "walker_walk", preset="dmgb", method="svea", strong=strong)
        row = {"frames": 100_000, f"cosine_actor_{strong}": 0.9, "cosine_actor_shift": 0.8}
        write_rows(config.folder / "diagnostics.jsonl", [row])
    table = published_statistics(read_runs(tmp_path).records)[1]
    assert table.columns == ["method", "cosine actor shift", "cosine actor, strong"] and len(table.rows) == 4
    assert table.rows[0] == ["svea, strong blur, here", "0.800 (1) at 100,000", "0.900 (1) at 100,000"]


def test_the_data_file() -> None:
    """Every entry names a source, a known preset and task, and a recipe."""
    data = published()
    for entry in data["returns"]:
        assert entry["source"] in data["sources"]
        make_config(entry["task"], preset=entry["preset"], method=entry["method"])
    for entry in data["statistics"]:
        make_config(entry["task"], preset=entry["preset"], method=entry["method"], **entry["settings"])
    found = {(e["method"], e["statistic"]): e["value"] for e in data["statistics"] if e["table"] == "Table 1"}
    assert table_one()["ours"]["target_std"] == 0.182
    assert len(found) == 24 and found["drq_kl", "kl_author"] == 0.099 and found["rad", "critic_loss_std"] == 0.772
    table2 = {(e["task"], e["method"]): e["value"] for e in data["returns"] if e["source"] == "paper"}
    assert len(table2) == 10 and table2["finger_spin", "ours"] == 447.99


def test_statistics_at_frames_that_all_have(tmp_path: Path) -> None:
    for seed, rows in ((1, [(10, 1.0), (20, 2.0)]), (2, [(10, 3.0)])):
        config = write_run(tmp_path, method="drq", seed=seed)
        write_rows(config.folder / "diagnostics.jsonl", [{"frames": f, "target_std": v} for f, v in rows])
    records = read_runs(tmp_path).records
    assert statistic(records, "target_std") == (Mean.of([1.0, 3.0]), 10)
    assert statistic(records, "kl_author") is None


# ------------------------------------------------------------------------------------------------ claims


def mean(value: float, std: float = 0.1, n: int = 5) -> Mean:
    return Mean(value, std, n)


def test_verdicts_by_hand() -> None:
    # standard error of a difference: 0.1 sqrt(2 / 5) = 0.063; two of them 0.126
    clear, near, wrong = (Comparison("", mean(1.0), mean(high), 100) for high in (1.2, 1.1, 0.8))
    assert [c.verdict for c in (clear, near, wrong)] == ["held", "undecided", "not held"]
    assert Comparison("", mean(1.0), Mean.of([9.0]), 100).verdict == "undecided"  # one seed
    assert conclude("C", "", [clear, near]).verdict == "undecided"
    assert conclude("C", "", [clear, near, wrong]).verdict == "not held"
    assert conclude("C", "", []).verdict == "not tested"


def test_claims_of_runs(ablation: Path) -> None:
    runs = read_runs(ablation)
    verdicts = {v.id: v for v in judge(runs.records, make_panels(runs))}
    assert [*verdicts] == [f"C{i}" for i in range(1, 14)]
    assert verdicts["C6"].verdict == "held" and verdicts["C6"].seeds == "3"  # the cosines were made to be
    assert verdicts["C8"].evidence and "video_hard" in verdicts["C8"].evidence[0]
    assert verdicts["C11"].verdict == "not tested"
    assert verdicts["C1"].evidence and all("drq < rad" in e for e in verdicts["C1"].evidence)


def test_what_is_missing(ablation: Path, tmp_path: Path) -> None:
    rows = {row[0]: row[2] for row in missing_table(read_runs(ablation)).rows}
    assert "39 of 45 pairs" in rows["ablation"] and "3 instead of 5" in rows["ablation"]
    assert "clips were generated" in rows["generalization"] and "overlay" in rows["generalization"]
    assert "frames" not in rows["ablation"]
    write_run(tmp_path, preset="cpu", task="toy_reach")
    assert "no run here" in missing_table(read_runs(tmp_path)).rows[0][2]


# ------------------------------------------------------------------------------------------------ bad input


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    good = write_run(tmp_path, method="drq", seed=1)
    with (good.folder / "eval.jsonl").open("a") as file:
        file.write('{"frames": 600000, "steps": 3000')  # killed while writing
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.json").write_text('{"model": "resnet"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "list").mkdir()
    (tmp_path / "list/config.json").write_text("[]")
    unbegun = write_run(tmp_path, method="drq", seed=2)
    (unbegun.folder / "eval.jsonl").write_text("")
    units = write_run(tmp_path, method="drq", seed=3)
    row = {"frames": 50, "steps": 50, "seconds": 1.0, "return_mean": 5.0}
    write_rows(units.folder / "eval.jsonl", [row])
    disorder = write_run(tmp_path, method="drq", seed=4)
    rows = [json.loads(line) for line in (disorder.folder / "eval.jsonl").read_text().splitlines()]
    write_rows(disorder.folder / "eval.jsonl", rows[::-1])
    write_run(tmp_path / "copy", method="drq", seed=1, frames=100_000)
    runs = read_runs(tmp_path)
    assert [r.folder for r in runs.records] == [good.folder]
    why = dict(runs.left_out)
    assert "unknown fields" in why["foreign"] and "cannot be read" in why["broken"] and "list" in why
    assert "no evaluation" in why["drq/walker_run/drq/2"]
    assert "other units" in why["drq/walker_run/drq/3"]
    assert "order" in why["drq/walker_run/drq/4"]
    assert "the same run as" in why["copy/drq/walker_run/drq/1"]
    assert [w for p, w in runs.notes if p == "drq/walker_run/drq/1"] == [
        "1 line(s) of eval.jsonl are no rows and were passed over"
    ]


def test_mixed_machines_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, seed=1, precision="fp32")
    write_run(tmp_path, seed=2, precision="bf16")
    runs = read_runs(tmp_path)
    assert len(runs.groups()) == 1 and any("precision: bf16, fp32" in why for _, why in runs.notes)


def test_nothing_to_report(tmp_path: Path) -> None:
    for folder, hint in ((tmp_path / "nowhere", "not a folder"), (tmp_path, "no run")):
        with pytest.raises(UserError, match=hint):
            report(ReportArgs(folder, tmp_path / "out"))
    write_run(tmp_path / "runs", frames=10_000)
    with pytest.raises(UserError, match="reached 20,000"):
        report(ReportArgs(tmp_path / "runs", tmp_path / "out", frames=20_000))


# ------------------------------------------------------------------------------------------------ files


def test_forms_of_a_table() -> None:
    table = Table("t", "50 % & more", "a_b", ["x|y", "z"], [["1 ± 2", 'he said "no"'], ["<b>", "a,b"]])
    assert "| 1 ± 2 | he said" in table.markdown() and "x\\|y" in table.markdown()
    assert list(csv.reader(table.csv().splitlines())) == [["x|y", "z"], *table.rows]
    latex = table.latex()
    assert r"\caption{50 \% \& more. a\_b}" in latex and r"1 $\pm$ 2 & he said" in latex and r"$<$b$>$" in latex


@pytest.mark.parametrize(
    "text",
    [
        "step,episode,episode_reward,env,seed,agent\n0,0,10,walker_run,1,DrQ\n0,0,30,walker_run,2,DrQ\n8,1,50,walker_run,1,DrQ\n",
        ",agent,env,seed,frame,episode_reward,hour\n0,DrQ,walker_run,1,0,10,0\n1,DrQ,walker_run,2,0,30,0\n2,DrQ,walker_run,1,8,50,1\n",
    ],
    ids=["drq", "drqv2"],
)
def test_published_curves(text: str, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(text)
    (reference,) = read_reference(path)
    assert (reference.task, reference.name, reference.seeds) == ("walker_run", "DrQ", 2)
    assert reference.frames.tolist() == [0, 8] and reference.mean.tolist() == [20, 50]
    assert reference.std.tolist() == [10, 0]
    runs = tmp_path / "runs"
    write_run(runs, frames=10, action_repeat=2, points=3)
    assert report(ReportArgs(runs, tmp_path / "out", reference=(path,))).is_file()
    assert "published" not in (tmp_path / "out/tables/returns_drq_train.csv").read_text()
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="form"):
        read_reference(path)


def test_everything_is_written(page: Path) -> None:
    folder = page.parent
    names = {p.name for p in (folder / "tables").iterdir()}
    for stem in ("returns_drq_train", "returns_dmgb_video_hard", "claims", "missing", "configuration", "speed", "runs"):
        assert {f"{stem}.md", f"{stem}.csv", f"{stem}.tex"} <= names
    figures = {p.name for p in (folder / "figures").iterdir()}
    for stem in ("curves_drq_train_frames", "curves_drq_train_hours", "statistics_drq_walker_run", "backgrounds_dmgb"):
        assert {f"{stem}.png", f"{stem}.svg"} <= figures
    with (folder / "tables/curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (18 + 1 + 6 * 2) * 11
    assert {r["clips"] for r in rows if r["background"] == "video_hard"} == {"generated clips"}


def test_the_page_stands_alone_and_escapes(page: Path, tmp_path: Path) -> None:
    html = page.read_text()
    assert "Two tasks &amp; three &lt;methods&gt;" in html
    addresses = re.findall(r"""(?:src|href)=["']([^"']{0,20})""", html)
    assert addresses and all(a.startswith(("data:", "#")) for a in addresses)
    assert "<script" not in html and "http" not in re.sub(r"data:[^\"]*", "", html)
    bad = "<script>alert(1)</script>"
    config = write_run(tmp_path / "runs", preset="dmgb", task="walker_walk", method="svea")
    rows = [json.loads(line) for line in (config.folder / "eval.jsonl").read_text().splitlines()]
    write_rows(config.folder / "eval.jsonl", [r | ({"videos": bad} if "videos" in r else {}) for r in rows])
    (tmp_path / "runs/<b>odd").mkdir()
    (tmp_path / "runs/<b>odd/config.json").write_text("{")
    html = report(ReportArgs(tmp_path / "runs", tmp_path / "out")).read_text()
    assert "<script" not in html and "&lt;script&gt;" in html and "<b>odd" not in html


@pytest.mark.slow
def test_a_thousand_runs(tmp_path: Path) -> None:
    """1,000 runs of 50 evaluations: read, aggregated and judged in 10 s and 1 GB."""
    for method in ("rad", "rad_plus", "drq", "drq_kl", "ours"):
        for task in ("walker_run", "cheetah_run", "reacher_hard", "finger_spin", "hopper_hop"):
            for seed in range(1, 41):
                write_run(tmp_path, task, method=method, seed=seed, points=50)
    code = f"""
import time
from pathlib import Path
from unmoved.report.claims import judge
from unmoved.report.panels import make_panels, make_suites
from unmoved.report.runs import read_runs
from unmoved.report.tables import aggregate_tables, score_tables
start = time.process_time()
runs = read_runs(Path({str(tmp_path)!r}))
panels = make_panels(runs)
score_tables(panels), aggregate_tables(make_suites(panels)), judge(runs.records, panels)
assert len(runs.records) == 1000
peak = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'))  # rusage would count the parent's
print(time.process_time() - start, int(peak.split()[1]) / 1e6)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, gigabytes = map(float, done.stdout.split())
    assert seconds < 10 and gigabytes < 1, done.stdout


# ------------------------------------------------------------------------------------------------ the browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The page sits in a frame: a window cannot be made as narrow as a phone.
FRAME = """<body style="margin: 0"><script>
window.onmessage = (e) => document.body.dataset.seen = e.data;
</script><iframe src="page.html" width="{width}" height="900" style="border: 0"></iframe></body>"""
PROBE = """<script>
const errors = [];
window.onerror = (m) => errors.push(m);
window.onload = () => setTimeout(() => {
  const images = [...document.images], videos = [...document.querySelectorAll("video")];
  const texts = [...document.querySelectorAll("p, td, figcaption")];
  parent.postMessage(JSON.stringify({
    errors: errors.length,
    images: images.length, drawn: images.filter(i => i.complete && i.naturalWidth > 0).length,
    videos: videos.length, loaded: videos.filter(v => v.readyState > 0 && v.videoWidth > 0).length,
    width: innerWidth, needed: document.documentElement.scrollWidth,
    small: texts.filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).length,
  }), "*");
}, 1500);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(page: Path, width: int, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page.read_text().replace("</body>", PROBE))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1400,1000",
               "--virtual-time-budget=8000", "--dump-dom", f"--user-data-dir={tmp_path}/profile"]  # fmt: skip
    command = [str(CHROMIUM), *options, (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["images"] == seen["drawn"] == page.read_text().count("<img ") > 8
    assert seen["videos"] == seen["loaded"] == 1
    assert seen["width"] == width and seen["needed"] <= width, "the page is wider than the screen"
    assert seen["small"] == 0 and seen["errors"] == 0 and "CONSOLE" not in done.stderr
