"""The picture sheet: what its panels hold, and that a file comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from unmoved import cli, envs, show
from unmoved.config import make_config
from unmoved.errors import UserError
from unmoved.methods import make_transform
from unmoved.show import ShowArgs, play, transform_row

CONFIG = make_config("toy_reach", image_size=32)


def args(**changes: Any) -> ShowArgs:
    return ShowArgs(**({"task": "toy_reach", "size": 32, "draws": 3} | changes))


def image(panel: show.Panel) -> NDArray[Any]:
    assert panel.image is not None
    return panel.image


def test_a_row_shows_the_state_its_views_and_their_tangent() -> None:
    (state,) = play(args(), "toy_reach")
    shift = make_transform("shift", CONFIG)
    row = transform_row("shift", shift, state, args())
    generator = torch.Generator().manual_seed(0)
    tau = shift.sample(3, generator)
    views, tangent = shift(state.expand(3, -1, -1, -1), tau), shift.tangent(state, tau[:1], shift.direction(generator))
    assert len(row.panels) == 1 + 3 + 1
    assert (image(row.panels[0]) == state[0, -3:].permute(1, 2, 0).numpy()).all()
    for panel, view, t in zip(row.panels[1:4], views, tau, strict=True):
        assert (image(panel) == view[-3:].permute(1, 2, 0).numpy()).all()
        assert panel.caption == f"τ = {t[0]}, {t[1]}"
    mean = tangent[0, -3:].mean(0).numpy()
    assert np.abs(image(row.panels[4]) - mean).max() < 1e-4
    assert f"±{np.abs(mean).max():.3g} per pixel" in row.panels[4].caption


def test_a_family_without_a_tangent_says_so() -> None:
    row = transform_row("flip", make_transform("flip", CONFIG), play(args(), "toy_reach")[0], args())
    assert row.panels[-1] == show.Panel(None, "no tangent")


def test_what_is_generated_is_labelled() -> None:
    assert show.label("overlay", True) == "overlay\n(generated images)" and show.label("overlay", False) == "overlay"
    assert show.label("video_hard", True) == "video_hard\n(generated clips)"
    assert show.label("color_hard", True) == "color_hard"


def test_backgrounds_reach_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []
    make = envs.make

    def spy(task: str, *, background: str = "train", videos: Any = None, **settings: Any) -> Any:
        made.append((background, videos))
        return make(task, **settings)

    monkeypatch.setattr(envs, "make", spy)
    path = show.show(args(transforms="", backgrounds="train,video_hard", videos=tmp_path, out=tmp_path / "b.png"))
    assert made[1:] == [("train", tmp_path), ("video_hard", tmp_path)] and path.is_file()


def test_the_command_writes_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["show", "toy-exit", "--size", "24", "--draws", "2", "--steps", "200"])  # more steps than the episode has
    with Image.open(tmp_path / "toy_exit.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[0] > 600 and pixels.shape[1] > 600 and pixels.std() > 20  # five rows, not blank


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"transforms": "shift,rotat"}, "Did you mean: rotate"),
        ({"task": "toy_raech"}, "Did you mean: toy_reach"),
        ({"draws": 0}, "--draws and --size must be at least 1"),
        ({"transforms": " , "}, "nothing to show"),
    ],
)
def test_refusals(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        show.show(args(out=tmp_path / "x.png", **changes))
    assert list(tmp_path.iterdir()) == []
