"""Where runs stand, from their files alone: at any time, from any machine that sees the folder."""

from __future__ import annotations

import fcntl
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from unmoved.config import Config
from unmoved.errors import UserError

Name = Literal["waiting", "running", "interrupted", "finished", "failed"]
COLOURS: dict[str, str] = {"running": "cyan", "interrupted": "yellow", "finished": "green", "failed": "red"}
TAIL = 1 << 16  # bytes: more than any row


@dataclass(frozen=True)
class State:
    name: Name
    frames: int = 0
    total: int = 0
    score: float | None = None  # of the last evaluation in the training scene
    seconds: float = 0.0  # trained so far
    age: float | None = None  # seconds since the last row
    why: str = ""  # of a failure, the last lines

    @property
    def left(self) -> float | None:
        """Seconds to go at the pace so far."""
        if self.name == "finished" or not self.frames or not self.seconds:
            return None
        return max(0.0, self.seconds / self.frames * (self.total - self.frames))


def last_rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows at the end of a file, without reading all of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")[1 if size > TAIL else 0 :]
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # half-written
            continue
        if isinstance(row, dict) and isinstance(row.get("frames"), int):
            rows.append(row)
    return rows


def locked(folder: Path) -> bool:
    """Whether a process is training this run."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def newest_checkpoint(folder: Path) -> int | None:
    """Agent steps of it."""
    return max((int(p.name) for p in (folder / "checkpoint").glob("*") if p.name.isdigit()), default=None)


def failure(folder: Path) -> str:
    """The last lines of a run that was given up."""
    try:
        return "\n".join(json.loads((folder / "failed.json").read_text())["last_lines"])
    except (OSError, ValueError, KeyError, TypeError):
        return "failed.json cannot be read"


def look(folder: Path, config: Config, running: bool | None = None) -> State:
    """The state of a run whose goal is `config`. `running`: known to the caller, else the lock tells."""
    train, evaluations = last_rows(folder / "train.jsonl"), last_rows(folder / "eval.jsonl")
    rows = [*train[-1:], *evaluations[-1:]]
    last = max(rows, key=lambda row: row["frames"], default={})
    score = next((r.get("return_mean") for r in reversed(evaluations) if r.get("background", "train") == "train"), None)
    ages = [time.time() - p.stat().st_mtime for n in ("train", "eval") if (p := folder / f"{n}.jsonl").is_file()]
    state = State(
        "waiting", last.get("frames", 0), config.frames, score, last.get("seconds", 0.0), min(ages, default=None)
    )

    def named(name: Name, why: str = "") -> State:
        return State(name, state.frames, state.total, score, state.seconds, state.age, why)

    kept = newest_checkpoint(folder)
    evaluated = evaluations[-1].get("steps", 0) if evaluations else 0
    # A run whose checkpoints were removed afterwards is still finished; one killed before its last one is not.
    if evaluated >= config.total_steps and (kept is None or kept >= config.total_steps):
        return named("finished")
    if locked(folder) if running is None else running:
        return named("running")
    if (folder / "failed.json").is_file():
        return named("failed", failure(folder))
    return named("interrupted") if rows or kept else state


def find_runs(root: Path) -> list[Path]:
    """Folders with a config.json, or with the record of a failure before there was one."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder")
    found = {path.parent for name in ("config.json", "failed.json") for path in root.rglob(name)}
    return sorted(found)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def table(states: dict[str, State], rows: int | None = None) -> Table:
    """What matters first: running, failed, interrupted, then the rest; at most `rows` of them."""
    out = Table(box=None, pad_edge=False)
    for column in ("run", "state", "frames", "", "return", "trained", "left", "last row"):
        out.add_column(column, header_style="bold", justify="left" if column in ("run", "state") else "right")
    order = ("running", "failed", "interrupted", "waiting", "finished")
    listed = sorted(states.items(), key=lambda item: order.index(item[1].name))
    for name, s in listed[:rows]:
        out.add_row(
            Text(name, overflow="fold"),
            Text(s.name, style=COLOURS.get(s.name, "")),
            f"{s.frames:,} / {s.total:,}",
            f"{min(s.frames / max(s.total, 1), 1):.0%}",
            "-" if s.score is None else f"{s.score:.1f}",
            duration(s.seconds),
            duration(s.left),
            "-" if s.age is None or s.name == "finished" else f"{duration(s.age)} ago",
        )
    if rows is not None and len(listed) > rows:
        out.add_row(f"… and {len(listed) - rows} more")
    return out


def summary(states: dict[str, State]) -> str:
    counts = {name: sum(s.name == name for s in states.values()) for name in (*COLOURS, "waiting")}
    return f"{len(states)} runs: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n)


def status(root: Path) -> bool:
    """Print the table; False where a run has failed."""
    from unmoved.log import console

    states: dict[str, State] = {}
    for folder in find_runs(root):
        name = str(folder.relative_to(root)) if folder != root else str(folder)
        if not (folder / "config.json").is_file():
            states[name] = State("failed", why=failure(folder))
            continue
        try:
            states[name] = look(folder, Config.load(folder))
        except UserError as error:
            console.print(f"left out: {error}", markup=False, soft_wrap=True)
    if not states:
        raise UserError(f"there is no run under {root}")
    console.print(table(states))
    for name, s in states.items():
        if s.name == "failed":
            console.print(f"\n{name} failed; its last lines:\n{s.why}", markup=False, soft_wrap=True)
    console.print(summary(states))
    return not any(s.name == "failed" for s in states.values())
