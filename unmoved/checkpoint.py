"""Checkpoints: written whole or not at all, verified before use, the previous one kept.

<run>/checkpoint/<steps>/{agent.pt, replay.pt, manifest.json}
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unmoved.errors import UserError


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sync(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(run: Path, steps: int, parts: dict[str, Any]) -> Path:
    """Write the parts beside the older checkpoints; only a rename makes them one. The previous one stays."""
    folder = run / "checkpoint"
    draft, final = folder / f"draft-{steps}", folder / f"{steps:010d}"
    for left in folder.glob("draft-*"):  # of a save that was cut off
        shutil.rmtree(left)
    draft.mkdir(parents=True)
    manifest = {}
    for name, part in parts.items():
        path = draft / f"{name}.pt"
        torch.save(part, path)
        sync(path)
        manifest[path.name] = {"bytes": path.stat().st_size, "blake2b": digest(path)}
    (draft / "manifest.json").write_text(json.dumps(manifest))
    sync(draft / "manifest.json")
    shutil.rmtree(final, ignore_errors=True)  # of an earlier life of the run
    draft.rename(final)
    sync(folder)
    for old in listed(run)[2:]:
        shutil.rmtree(old)
    return final


def listed(run: Path) -> list[Path]:
    """Newest first."""
    return sorted((p for p in (run / "checkpoint").glob("*") if p.name.isdigit()), reverse=True)


def problem(folder: Path, names: tuple[str, ...]) -> str | None:
    """What is wrong with a checkpoint, if anything."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in names:
            path, known = folder / f"{name}.pt", manifest[f"{name}.pt"]
            if path.stat().st_size != known["bytes"]:
                return f"{path.name} has {path.stat().st_size} bytes instead of {known['bytes']}"
            if digest(path) != known["blake2b"]:
                return f"{path.name} does not match its checksum"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(
    run: Path, names: tuple[str, ...], say: Callable[[str], None], device: Any = "cpu", steps: int | None = None
) -> dict[str, Any] | None:
    """The newest whole checkpoint's parts, None where there never was one. A damaged one is named and passed over.
    steps: the one of these agent steps."""
    folders = [f for f in listed(run) if steps is None or int(f.name) == steps]
    if not folders and listed(run):
        kept = ", ".join(str(int(f.name)) for f in listed(run))
        raise UserError(f"{run} has no checkpoint of {steps} agent steps; it has those of {kept}")
    for folder in folders:
        wrong = problem(folder, names)
        if wrong is None:
            return {name: torch.load(folder / f"{name}.pt", map_location=device, weights_only=True) for name in names}
        say(f"checkpoint {folder.name} is damaged ({wrong}); trying the previous one")
    if folders:
        raise UserError(f"no checkpoint of {run} is whole. To start over, remove the folder.")
    return None


def set_aside(run: Path, steps: int) -> None:
    """Rename what is newer than the checkpoint in use: it was found damaged, and must not outlive whole ones."""
    for folder in listed(run):
        if int(folder.name) > steps:
            folder.rename(folder.with_name(f"damaged-{folder.name}"))
