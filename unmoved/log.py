"""What a run leaves behind: rows in JSONL files, videos, and a progress display."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

console = Console(highlight=False)


class Rows:
    """A JSONL file. `keep` cuts it back to a length, so that a resumed run continues where its checkpoint was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @property
    def length(self) -> int:
        return self.path.stat().st_size

    def keep(self, length: int) -> None:
        os.truncate(self.path, min(length, self.length))

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows; a half-written last one is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


class Meter:
    """Means of the updates' metrics since the last reading, kept on the device: one transfer per reading.

    It also remembers where the first batch with a non-finite metric lay in the replay. Everything is written in place,
    so that adding can be part of a CUDA graph.
    """

    def __init__(self, batch_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.sums: dict[tuple[str, ...], Tensor] = {}  # updates with and without an actor step have other metrics
        self.bad = torch.zeros((), dtype=torch.bool, device=self.device)
        self.bad_index = torch.zeros(batch_size, dtype=torch.long, device=self.device)

    def clear(self) -> None:
        for values in self.sums.values():
            values.zero_()
        self.bad.zero_()

    def add(self, metrics: dict[str, Tensor], index: Tensor) -> None:
        names = tuple(metrics)
        values = torch.stack(list(metrics.values())).to(torch.float64)
        if names not in self.sums:
            self.sums[names] = torch.zeros(len(names) + 1, dtype=torch.float64, device=self.device)  # last: how many
        self.sums[names][:-1] += values
        self.sums[names][-1] += 1
        self.bad_index.copy_(torch.where(self.bad, self.bad_index, index))
        self.bad |= ~values.isfinite().all()

    def read(self) -> dict[str, float]:
        """Means by name, over the updates that had it."""
        totals: dict[str, list[float]] = {}
        for names, values in self.sums.items():
            *sums, count = values.tolist()
            for name, value in zip(names, sums, strict=True):
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += count
        return {name: total / count for name, (total, count) in totals.items() if count}

    def offence(self) -> Tensor | None:
        """Starts of the first batch with a non-finite metric, or None."""
        return self.bad_index if bool(self.bad) else None

    def state(self) -> list[Any]:
        return [[list(names), values] for names, values in self.sums.items()]

    def load_state(self, state: list[Any]) -> None:
        self.sums = {tuple(names): values.to(self.device) for names, values in state}


class Display:
    """A progress bar with return, frames/s and time left; plain lines where there is no terminal."""

    def __init__(self, title: str, total: int, done: int) -> None:
        self.title, self.total = title, total
        self.started, self.first = time.monotonic(), done
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[frames]} frames  {task.fields[speed]} frames/s  return {task.fields[score]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(title, total=total, completed=done, frames=str(done), speed="-", score="-")
        self.bar.start()

    def update(self, frames: int) -> None:
        speed = (frames - self.first) / max(time.monotonic() - self.started, 1e-9)
        self.bar.update(self.task, completed=frames, frames=f"{frames:,}", speed=f"{speed:,.0f}")

    def evaluated(self, row: dict[str, Any]) -> None:
        score = f"{row['return_mean']:.1f} ± {row['return_std']:.1f}"
        background = row.get("background", "train")
        if background == "train":
            self.bar.update(self.task, score=score)
            where = ""
        else:
            where = f"  {background}" + (f" ({row['videos']})" if "videos" in row else "")
        clock = time.strftime("%H:%M:%S", time.gmtime(row["seconds"]))
        episodes = f"({row['episodes']} episodes)"
        line = f"{clock}  {self.title}  {row['frames']:>9,} frames  return {score}  {episodes}{where}"
        console.print(line, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


def jsonable(values: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: non-finite numbers become null."""
    return {k: v if math.isfinite(v) else None for k, v in values.items()}


def write_video(path: Path, frames: list[NDArray[np.uint8]], fps: int = 30, scale: int = 4) -> None:
    """An MP4 of (h, w, 3) frames, enlarged for the eye."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=fps)
        height, width = (n * scale // 2 * 2 for n in frames[0].shape[:2])
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            file.mux(stream.encode(picture.reformat(width=width, height=height, interpolation="BICUBIC")))
        file.mux(stream.encode())
