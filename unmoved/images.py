"""The overlay's bank of images: a user's folder, or a generated default."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unmoved.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


def overlay_bank(folder: Path | None, size: int = 128, limit: int = 5_000) -> Tensor:
    """(N, 3, size, size) uint8: the photographs of a folder (searched through), or generated textures."""
    return generated_bank(64, size) if folder is None else load_bank(Path(folder), size, limit)


def load_bank(folder: Path, size: int, limit: int) -> Tensor:
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
    """Textures with the 1/f spectrum of natural images in random palettes; the same for everybody."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None])
    frequency[0, 0] = np.inf  # no offset
    images = []
    for _ in range(count):
        spectrum = rng.normal(size=(2, 3, *frequency.shape)) / frequency ** rng.uniform(1.0, 1.6)
        noise = np.fft.irfft2(spectrum[0] + 1j * spectrum[1], s=(size, size))  # (3, size, size)
        noise /= noise.std((1, 2), keepdims=True)
        mixing = rng.normal(size=(3, 3)) * 0.5 + np.eye(3)  # correlates the colours
        level = rng.uniform(60, 190, size=(3, 1, 1))
        images.append(np.clip(level + 40 * np.tensordot(mixing, noise, 1), 0, 255).astype(np.uint8))
    return torch.from_numpy(np.stack(images))
