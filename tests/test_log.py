from __future__ import annotations

import math
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from unmoved.log import Meter, Rows, jsonable, read_rows, write_video


def test_meter_averages_over_the_updates_that_had_a_metric() -> None:
    meter = Meter(2)
    index = torch.tensor([5, 6])
    meter.add({"a": torch.tensor(1.0)}, index)
    meter.add({"a": torch.tensor(3.0), "b": torch.tensor(10.0)}, index)
    assert meter.read() == {"a": 2.0, "b": 10.0} and meter.offence() is None
    meter.clear()
    assert meter.read() == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_meter_remembers_the_first_bad_batch(bad: float) -> None:
    meter = Meter(2)
    for i, value in enumerate((1.0, bad, 2.0, bad)):
        meter.add({"loss": torch.tensor(value)}, torch.tensor([i, i]))
    offence = meter.offence()
    assert offence is not None and offence.tolist() == [1, 1]


def test_meter_resumes() -> None:
    a, b = Meter(1), Meter(1)
    a.add({"x": torch.tensor(1.0)}, torch.tensor([0]))
    b.load_state(a.state())
    b.add({"x": torch.tensor(2.0)}, torch.tensor([0]))
    assert b.read() == {"x": 1.5}


def test_rows_are_cut_back_and_half_rows_left_out(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.jsonl")
    rows.write({"i": 0})
    length = rows.length
    rows.write({"i": 1})
    rows.path.open("a").write('{"i": 2, "half')
    assert read_rows(rows.path) == [{"i": 0}, {"i": 1}]
    rows.keep(length)
    assert read_rows(rows.path) == [{"i": 0}]
    assert read_rows(tmp_path / "absent.jsonl") == []


def test_json_has_no_nan() -> None:
    assert jsonable({"a": math.nan, "b": 1.0, "c": -math.inf}) == {"a": None, "b": 1.0, "c": None}


def test_video_can_be_played(tmp_path: Path) -> None:
    frames = [np.full((21, 21, 3), 10 * i, np.uint8) for i in range(12)]
    write_video(tmp_path / "new" / "v.mp4", frames, scale=4)
    with av.open(str(tmp_path / "new" / "v.mp4")) as file:
        pictures = [f.to_ndarray(format="rgb24") for f in file.decode(video=0)]
    assert len(pictures) == 12 and pictures[0].shape == (84, 84, 3)
    assert abs(float(pictures[10].mean()) - 100) < 6
