"""The overlay's bank of images: a user's folder, or a generated default.

torch is imported where it is needed: environments use the textures without it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unmoved.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


def overlay_bank(folder: Path | None, size: int = 128, limit: int = 5_000) -> Tensor:
    """(N, 3, size, size) uint8: the photographs of a folder (searched through), or generated textures."""
    return generated_bank(64, size) if folder is None else load_bank(Path(folder), size, limit)


def load_bank(folder: Path, size: int, limit: int) -> Tensor:
    import torch
    from PIL import Image

    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    images, broken = [], []
    for path in paths[:limit]:
        try:
            with Image.open(path) as image:
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                square = image.convert("RGB").crop((left, top, left + side, top + side)).resize((size, size))
                images.append(np.asarray(square).transpose(2, 0, 1))
        except (OSError, Image.DecompressionBombError):  # the latter: a broken header claims a giant
            broken.append(path.name)
    if broken:
        warnings.warn(f"{len(broken)} unreadable image(s) in {folder} skipped: {', '.join(broken[:5])}", stacklevel=2)
    if not images:
        raise UserError(f"no readable image (jpg, png, webp, bmp) under {folder}")
    return torch.from_numpy(np.stack(images))


def generated_bank(count: int, size: int, seed: int = 0) -> Tensor:
    """The same for everybody."""
    import torch

    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([texture(rng, size).astype(np.uint8) for _ in range(count)]))


def texture(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """(3, size, size) in [0, 255]: the 1/f spectrum of natural images in a random palette. It tiles without a seam."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None])
    frequency[0, 0] = np.inf  # no offset
    spectrum = rng.normal(size=(2, 3, *frequency.shape)) / frequency ** rng.uniform(1.0, 1.6)
    noise = np.fft.irfft2(spectrum[0] + 1j * spectrum[1], s=(size, size))
    noise /= noise.std((1, 2), keepdims=True)
    mixing = rng.normal(size=(3, 3)) * 0.5 + np.eye(3)  # correlates the colours
    level = rng.uniform(60, 190, size=(3, 1, 1))
    return np.clip(level + 40 * np.tensordot(mixing, noise, 1), 0, 255)
