"""The demonstration, on a toy and for a moment only."""

from __future__ import annotations

from pathlib import Path

import pytest

from unmoved.demo import DemoArgs, demo
from unmoved.log import read_rows


def test_demo_leaves_a_curve_a_video_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(DemoArgs(task="toy_reach", frames=2_400, runs=tmp_path))
    folder = tmp_path / "cpu" / "toy_reach" / "rad" / "1"
    assert (folder / "curve.png").stat().st_size > 10_000
    assert (folder / "video" / "trained.mp4").stat().st_size > 1_000
    rows = {row["policy"]: row for row in read_rows(folder / "demo.jsonl")}
    assert rows["trained"]["episodes"] == rows["random"]["episodes"] == 10
    sentence = capsys.readouterr().out.strip().splitlines()[-1]
    for row in rows.values():
        assert f"{row['return_mean']:.0f}" in sentence
