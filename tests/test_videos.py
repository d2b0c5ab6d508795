"""Clips behind a task: generated, or whatever people keep in folders."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import golden_inputs
import numpy as np
import pytest
import torch
from PIL import Image

from unmoved import videos
from unmoved.errors import UserError
from unmoved.log import write_video
from unmoved.videos import find_clips, generate, resize

GOLDEN = Path(__file__).parent / "golden" / "chroma_key.json"


def picture(grey: int, width: int = 8, height: int = 8) -> Any:
    return np.full((height, width, 3), grey, np.uint8)


def clip(path: Path, greys: list[int], side: int = 16) -> None:
    write_video(path, [picture(grey, side, side) for grey in greys], scale=1)


def greys(clips: videos.Clips, index: int, limit: int = 50) -> list[int]:
    return [round(float(frame.mean()), -1) for frame in clips.load(index, 4, limit)]  # to tens: the codec is lossy


# Resizing


def test_resizing_is_the_benchmarks() -> None:
    for case in json.loads(GOLDEN.read_text())["resize"]:
        image = golden_inputs.images(case["image_key"], 1, 3, case["source"])[0].transpose(1, 2, 0)
        want = np.array(case["output"]).transpose(1, 2, 0)
        assert np.abs(resize(image, case["size"]).astype(int) - want).max() <= 1


@pytest.mark.parametrize("shape", [(37, 90), (352, 352), (1, 5), (84, 84)])
def test_resizing_any_shape(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    want = (torch.nn.functional.interpolate(x, (84, 84), mode="bilinear") * 255).byte()[0].permute(1, 2, 0).numpy()
    assert np.abs(resize(image, 84).astype(int) - want).max() <= 1
    assert (resize(image, 84) == want).mean() > 0.98


# Generated clips


def test_generated_clips_move_smoothly_and_differ() -> None:
    one, other, easy = (
        generate("video_hard", 1, 32, 40),
        generate("video_hard", 2, 32, 2),
        generate("video_easy", 1, 32, 2),
    )
    assert one.shape == (40, 32, 32, 3) and one.dtype == np.uint8
    assert (one[:2] != other).any() and (one[:2] != easy).any()
    assert (generate("video_hard", 1, 32, 3) == one[:3]).all()  # a longer clip begins with the shorter one
    step, jump = (np.abs(one[n].astype(int) - one[0]).mean() for n in (1, 30))
    assert 0.1 < step < 0.5 * jump  # moves, and not as noise does
    assert one.std((1, 2)).min() > 10  # something to see in every channel of every frame
    neighbours, strangers = (np.abs(one - np.roll(one.astype(int), n, 2)).mean() for n in (1, 16))
    assert neighbours < 0.6 * strangers


def test_generated_clips_are_the_same_in_another_process_and_need_no_torch() -> None:
    code = (
        "import sys, hashlib, numpy as np; np.random.seed(3)\nfrom unmoved.videos import generate\n"
        "print(hashlib.sha256(generate('video_easy', 7, 24, 5).tobytes()).hexdigest(), 'torch' in sys.modules)"
    )
    run = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)]
    import hashlib

    assert run[0] == run[1] == f"{hashlib.sha256(generate('video_easy', 7, 24, 5).tobytes()).hexdigest()} False\n"


def test_without_a_folder_clips_are_generated_and_say_so() -> None:
    assert [len(find_clips(None, kind).sources) for kind in videos.KINDS] == [10, 100, 60]
    clips = find_clips(None, "video_easy")
    assert clips.name == "generated clips"
    assert (clips.load(3, 16, 4) == generate("video_easy", 3, 16, 4)).all()
    assert clips.load(3, 16, 4) is clips.load(3, 16, 4)  # kept


# Folders


def test_the_benchmarks_folders_in_numeric_order(tmp_path: Path) -> None:
    for i in (0, 1, 2, 10):
        clip(tmp_path / "dmgb" / "video_hard" / f"video{i}.mp4", [10 * i, 200])
    clip(tmp_path / "dmgb" / "video_easy" / "video6.mp4", [100] * 3)
    (tmp_path / "dmgb" / "video_hard" / "notes.txt").write_text("no clip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hard, easy = (find_clips(tmp_path / "dmgb", kind) for kind in ("video_hard", "video_easy"))
        inner = find_clips(tmp_path / "dmgb" / "video_hard", "video_hard")
    assert [greys(hard, i) for i in range(4)] == [[0, 200], [10, 200], [20, 200], [100, 200]]
    assert (hard.name, easy.name, inner.name) == ("dmgb", "dmgb", "video_hard")
    assert greys(easy, 0) == [100] * 3 and greys(easy, 0, limit=2) == [100] * 2
    assert inner.sources == hard.sources == find_clips(tmp_path / "dmgb", "distracting").sources


def test_image_sequences_of_odd_sizes_and_modes(tmp_path: Path) -> None:
    for name, shade in (("bear", 50), ("bus", 150)):
        (tmp_path / name).mkdir()
        Image.fromarray(picture(shade, 33, 7)).save(tmp_path / name / "10.png")
        Image.fromarray(picture(shade + 10, 5, 90)).convert("L").save(tmp_path / name / "9.jpg")
        Image.fromarray(picture(shade + 20, 1, 1)).convert("RGBA").save(tmp_path / name / "11.png")
    (tmp_path / "empty").mkdir()
    clips = find_clips(tmp_path, "distracting")
    assert [greys(clips, i) for i in range(2)] == [[60, 50, 70], [160, 150, 170]]
    assert greys(find_clips(tmp_path / "bus", "video_hard"), 0) == [160, 150, 170]  # the folder itself is one


def test_broken_clips_are_named_and_skipped(tmp_path: Path) -> None:
    clip(tmp_path / "a.mp4", [90] * 3)
    (tmp_path / "b.mp4").write_text("not a video")
    (tmp_path / "c.mp4").touch()
    clip(tmp_path / "d.mp4", [30] * 3)
    with pytest.warns(UserWarning, match=r"2 unreadable clip\(s\).*b\.mp4, c\.mp4"):
        clips = find_clips(tmp_path, "video_hard")
    assert [greys(clips, i) for i in range(2)] == [[90] * 3, [30] * 3]


def test_a_clip_that_breaks_off_is_named_and_used_up_to_there(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 64, 64, 3), dtype=np.uint8)
    write_video(tmp_path / "whole.mp4", list(noise), scale=1)
    import av

    # An index at the file's beginning survives the cut, as it does in an interrupted download.
    with (
        av.open(str(tmp_path / "whole.mp4")) as source,
        av.open(str(tmp_path / "cut.mp4"), "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    data = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    clips = find_clips(tmp_path, "video_hard")
    assert [p.name for p in clips.sources if isinstance(p, Path)] == ["cut.mp4", "whole.mp4"]
    with pytest.warns(UserWarning, match=r"cut\.mp4 breaks off after \d+ frames, which are used"):
        part = clips.load(0, 8, 100)
    whole = clips.load(1, 8, 100)
    assert len(whole) == 60 and 5 < len(part) < 55
    assert np.abs(part[:5].astype(int) - whole[:5]).mean() < 2


def test_a_broken_image_of_a_sequence_is_named_and_skipped(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for i in range(3):
        Image.fromarray(picture(40 * i)).save(tmp_path / "s" / f"{i}.png")
    (tmp_path / "s" / "1.png").write_text("x")
    clips = find_clips(tmp_path, "video_easy")
    with pytest.warns(UserWarning, match=r"unreadable image .*1\.png skipped"):
        assert greys(clips, 0) == [0, 80]


@pytest.mark.parametrize("kind", ["empty", "missing", "file", "only broken", "sound"])
def test_a_folder_without_clips(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    if kind == "file":
        folder.write_text("x")
    elif kind != "missing":
        folder.mkdir()
    if kind == "only broken":
        (folder / "x.mp4").write_text("x")
    if kind == "sound":
        import av

        with av.open(str(folder / "x.mp4"), "w") as file:
            stream = file.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 8000
            file.mux(stream.encode(frame))
            file.mux(stream.encode())
    with pytest.raises(UserError, match=r"no readable clip .*mine"):
        find_clips(folder, "video_hard")
