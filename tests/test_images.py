"""The overlay's bank: generated, or a folder of whatever people keep in folders."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unmoved.errors import UserError
from unmoved.images import generated_bank, load_bank, overlay_bank


def colour(path: Path, rgb: tuple[int, ...], size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, rgb).convert(mode).save(path)


def test_generated_bank_is_the_same_for_everybody() -> None:
    bank, state = generated_bank(5, 32), torch.get_rng_state()
    np.random.seed(1)  # neither global generator matters
    assert torch.equal(bank, generated_bank(5, 32)) and torch.equal(torch.get_rng_state(), state)
    assert bank.shape == (5, 3, 32, 32) and bank.dtype == torch.uint8
    assert not torch.equal(bank, generated_bank(5, 32, seed=1))
    assert all(not torch.equal(bank[i], bank[j]) for i in range(5) for j in range(i))


def test_generated_images_are_coloured_and_smooth_like_photographs() -> None:
    bank = generated_bank(8, 64).double()
    assert (bank.std((2, 3)) > 10).all()
    assert ((bank[:, 0] - bank[:, 1]).abs().mean((1, 2)) > 5).all()  # not grey
    neighbours, strangers = (bank - bank.roll(1, 3)).abs().mean(), (bank - bank.roll(32, 3)).abs().mean()
    assert neighbours < 0.6 * strangers


def test_the_default_is_generated() -> None:
    bank = overlay_bank(None, size=16)
    assert torch.equal(bank, generated_bank(64, 16))


def test_a_folder_with_odd_sizes_modes_and_depths(tmp_path: Path) -> None:
    colour(tmp_path / "a.png", (200, 10, 20), (1, 1))
    colour(tmp_path / "b" / "deep" / "wide.PNG", (30, 200, 40), (33, 7))
    colour(tmp_path / "b" / "tall.bmp", (0, 0, 250), (5, 90))
    colour(tmp_path / "c_grey.jpeg", (90, 90, 90), (20, 21), "L")
    colour(tmp_path / "d_palette.png", (255, 255, 0), (20, 21), "P")
    colour(tmp_path / "e_alpha.webp", (60, 70, 80), (20, 21), "RGBA")
    (tmp_path / "notes.txt").write_text("no picture")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bank = overlay_bank(tmp_path, size=16)
    assert bank.shape == (6, 3, 16, 16) and bank.dtype == torch.uint8
    want = [(200, 10, 20), (30, 200, 40), (0, 0, 250), (90, 90, 90), (255, 255, 0), (60, 70, 80)]  # in order of path
    got = bank.double().mean((2, 3))
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), atol=3)


def test_pictures_are_cropped_at_the_centre_not_squeezed(tmp_path: Path) -> None:
    stripes = np.zeros((10, 30, 3), np.uint8)
    stripes[:, :10, 0], stripes[:, 10:20, 1], stripes[:, 20:, 2] = 255, 255, 255  # red, green, blue thirds
    Image.fromarray(stripes).save(tmp_path / "a.png")
    Image.fromarray(stripes.transpose(1, 0, 2)).save(tmp_path / "b.png")
    bank = load_bank(tmp_path, 10, limit=10)
    assert (bank[:, 1] == 255).all() and not bank[:, 0].any() and not bank[:, 2].any()
    top = np.zeros((8, 8, 3), np.uint8)
    top[:4] = 255
    Image.fromarray(top).save(tmp_path / "c.png")
    assert load_bank(tmp_path, 8, limit=10)[2, 0].float().mean(1).tolist() == [255.0] * 4 + [0.0] * 4  # rows are rows


def test_broken_files_are_named_and_skipped(tmp_path: Path) -> None:
    colour(tmp_path / "good.png", (1, 2, 3))
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "empty.png").touch()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)).save(tmp_path / "whole.jpg")
    data = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "whole.jpg").unlink()
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, 90_000, 90_000, 1, 24, *[0] * 6)
    (tmp_path / "giant.bmp").write_bytes(header)  # claims 8 gigapixels
    with pytest.warns(UserWarning, match=r"4 unreadable image\(s\).*cut\.jpg, empty\.png, giant\.bmp, text\.jpg"):
        bank = load_bank(tmp_path, 8, limit=10)
    assert bank.shape == (1, 3, 8, 8) and bank[0, :, 0, 0].tolist() == [1, 2, 3]


def test_the_limit_takes_the_first(tmp_path: Path) -> None:
    for i in range(4):
        colour(tmp_path / f"{i}.png", (10 * i, 0, 0))
    assert load_bank(tmp_path, 4, limit=2)[:, 0, 0, 0].tolist() == [0, 10]


@pytest.mark.filterwarnings("ignore:1 unreadable")
@pytest.mark.parametrize("kind", ["empty", "missing", "file", "only broken"])
def test_nothing_to_overlay_is_the_users_to_mend(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    if kind in ("empty", "only broken"):
        folder.mkdir()
    if kind == "only broken":
        (folder / "x.png").write_text("x")
    if kind == "file":
        folder.write_text("x")
    with pytest.raises(UserError, match=r"no readable image .*photos"):
        overlay_bank(folder)
