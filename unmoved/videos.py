"""Clips to put behind a task: a user's folder of videos or image sequences, or generated ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unmoved import images
from unmoved.errors import UserError

SUFFIXES = {".mp4", ".avi", ".mkv", ".mov", ".webm"}
GENERATED = "generated clips"
# How many are generated, as many as the benchmark has. Also the folders of a kind that --videos may hold.
KINDS = {"video_easy": 10, "video_hard": 100, "distracting": 60}

Frames = NDArray[np.uint8]  # (n, size, size, 3)


class Clips(NamedTuple):
    """Numbered clips. Frames are decoded on first use and kept, a few megabytes per clip."""

    name: str  # in every result row
    sources: tuple[Path | tuple[str, int], ...]  # a file or folder, or the kind and number of a generated clip

    def load(self, index: int, size: int, limit: int) -> Frames:
        """The first `limit` frames of a clip, stretched to size x size."""
        return _load(self.sources[index], size, limit)


def find_clips(folder: Path | None, kind: str) -> Clips:
    """The readable clips of a folder in natural order (video2 before video10), or generated ones.

    A clip is a video file or a folder of images. The folder may hold one folder per kind, as the benchmark's does.
    """
    if folder is None:
        return Clips(GENERATED, tuple((kind, i) for i in range(KINDS[kind])))
    folder = Path(folder)
    inner = [folder / kind, *([folder / "video_hard"] if kind == "distracting" else [])]
    place = next((f for f in inner if f.is_dir()), folder)
    paths = sorted(place.iterdir(), key=_natural) if place.is_dir() else []
    paths = [p for p in paths if p.suffix.lower() in SUFFIXES or (p.is_dir() and _pictures(p))]
    if not paths and place.is_dir() and _pictures(place):
        paths = [place]  # one sequence
    readable = [p for p in paths if next(_frames(p), None) is not None]
    if not readable:
        raise UserError(f"no readable clip (mp4 or other video, or a folder of images) in {place}")
    if len(readable) < len(paths):
        broken = [p.name for p in paths if p not in readable]
        warnings.warn(f"{len(broken)} unreadable clip(s) in {place} skipped: {', '.join(broken[:5])}", stacklevel=2)
    return Clips(folder.resolve().name, tuple(readable))


def resize(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """(h, w, 3) -> (size, size, 3) as the benchmark does: bilinear between pixel centres, no smoothing, truncated."""
    for axis in (0, 1):
        length = image.shape[axis]
        centres = ((np.arange(size, dtype=np.float32) + 0.5) * np.float32(length / size) - 0.5).clip(0)
        low = centres.astype(np.intp)
        weight = (centres - low).reshape((-1, 1, 1) if axis == 0 else (-1, 1))
        scaled = image if axis else image.astype(np.float32) / 255
        near, far = scaled.take(low, axis), scaled.take(np.minimum(low + 1, length - 1), axis)
        image = near * (1 - weight) + far * weight
    return (image * 255).astype(np.uint8)


def _natural(path: Path) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _pictures(folder: Path) -> list[Path]:
    return sorted((p for p in folder.iterdir() if p.suffix.lower() in images.SUFFIXES), key=_natural)


@lru_cache(maxsize=100)
def _load(source: Path | tuple[str, int], size: int, limit: int) -> Frames:
    if not isinstance(source, Path):
        return generate(*source, size, limit)
    frames = []
    for frame in _frames(source, tell=True):
        frames.append(resize(frame, size))
        if len(frames) == limit:
            break
    return np.stack(frames)


def _frames(path: Path, tell: bool = False) -> Iterator[NDArray[np.uint8]]:
    """(h, w, 3) each, up to where the file breaks off; `tell` names a broken one."""
    count, trouble = 0, ""
    if path.is_dir():
        yield from _sequence(path, tell)
        return
    import av

    try:
        with av.open(str(path)) as file:
            promised = file.streams.video[0].frames if file.streams.video else 0  # 0: the format does not say
            for frame in file.decode(video=0):
                yield frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
                count += 1
            if count < promised:
                trouble = f"{promised} were promised"
    except (av.error.FFmpegError, OSError, ValueError, IndexError) as error:  # no video stream is an IndexError
        trouble = str(error)
    if trouble and tell:
        warnings.warn(f"{path} breaks off after {count} frames, which are used ({trouble})", stacklevel=2)


def _sequence(folder: Path, tell: bool) -> Iterator[NDArray[np.uint8]]:
    from PIL import Image

    for path in _pictures(folder):
        try:
            with Image.open(path) as image:
                yield np.asarray(image.convert("RGB"))
        except (OSError, Image.DecompressionBombError) as error:
            if tell:
                warnings.warn(f"unreadable image {path} skipped ({error})", stacklevel=2)


def generate(kind: str, number: int, size: int, limit: int) -> Frames:
    """A walk through coloured 1/f textures: a far layer, and nearer patches that pass in front of it faster.

    Every frame is a function of its number, so that a longer clip begins with the shorter one.
    """
    rng = np.random.default_rng([list(KINDS).index(kind), number])
    layers = [_Layer(rng, near) for near in (0, 1, 2)]
    y, x = ((np.mgrid[:size, :size] + 0.5) / size - 0.5).astype(np.float32)  # in units of the picture's width
    frames = np.empty((limit, size, size, 3), np.uint8)
    for t in range(limit):
        picture = np.zeros((size, size, 3), np.float32)
        for layer in layers:
            colour, cover = layer.look(x, y, t)
            picture += cover * (colour - picture)
        frames[t] = picture
    return frames


class _Layer:
    """A texture that tiles the plane, seen by a camera that drifts, sways, turns and zooms."""

    side = 128  # texels; the texture is one to two pictures wide

    def __init__(self, rng: np.random.Generator, near: int) -> None:
        colour = images.texture(rng, self.side)
        grey = colour.mean(0)
        colour = grey + 0.4 * (colour - grey)  # photographs are less colourful
        cover = np.ones((1, self.side, self.side))
        if near:  # soft patches over a fifth or so of the plane
            smooth = _blur(images.texture(rng, self.side)[:1], self.side)
            cover = (6 * (smooth - np.quantile(smooth, 0.8)) / smooth.std()).clip(0, 1)
        self.texels = np.concatenate([colour, cover]).transpose(1, 2, 0).astype(np.float32)  # (side, side, 4)
        angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(0.001, 0.004) * (1 + near)  # pictures per frame
        self.drift = speed * np.array([np.cos(angle), np.sin(angle)])
        self.start = rng.uniform(0, 1, 2)
        self.width = rng.uniform(0.6, 0.9) / (1 + 0.3 * near)  # of the picture, in textures
        self.sway, self.zoom, self.turn = rng.uniform(0.02, 0.06), rng.uniform(0.05, 0.25), rng.uniform(0.02, 0.15)
        self.rate, self.phase = rng.uniform(0.01, 0.04, 3), rng.uniform(0, 2 * np.pi, 3)  # radians per frame

    def look(
        self, x: NDArray[np.float32], y: NDArray[np.float32], t: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        sway, zoom, turn = np.array([self.sway, self.zoom, self.turn]) * np.sin(self.rate * t + self.phase)
        scale = self.width * (1 + zoom) * self.side
        cos, sin = scale * np.cos(turn), scale * np.sin(turn)
        left, top = (self.start + self.drift * t + sway) * self.side
        texels = _wrapped(self.texels, np.float32(cos) * x - np.float32(sin) * y + np.float32(left % self.side),
                          np.float32(sin) * x + np.float32(cos) * y + np.float32(top % self.side))  # fmt: skip
        return texels[..., :3], texels[..., 3:]


def _wrapped(texels: NDArray[np.float32], x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bilinear samples of a tiling texture at (x, y), in texels."""
    side = len(texels)
    flat = texels.reshape(side * side, -1)
    left, top = np.floor(x), np.floor(y)
    u, v = (x - left)[..., None], (y - top)[..., None]
    column, row = left.astype(np.intp) % side, top.astype(np.intp) % side
    right, row, below = (column + 1) % side, row * side, (row + 1) % side * side
    upper = flat.take(row + column, 0) * (1 - u) + flat.take(row + right, 0) * u
    lower = flat.take(below + column, 0) * (1 - u) + flat.take(below + right, 0) * u
    return (upper * (1 - v) + lower * v).astype(np.float32, copy=False)


def _blur(image: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """The lowest frequencies alone."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None]) * side  # cycles per texture
    return np.fft.irfft2(np.fft.rfft2(image) * np.exp(-((frequency / 3) ** 2)), s=(side, side))
