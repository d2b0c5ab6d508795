"""Run folders as training leaves them, without training: for the report's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from unmoved.config import Config, make_config

LEVEL = {"rad": 0.45, "rad_plus": 0.5, "drq": 0.55, "drq_kl_fixed": 0.57, "drq_kl": 0.6, "drac": 0.4, "svea": 0.5,
         "ours": 0.65, "drqv2": 0.5}  # fmt: skip


def write_run(
    runs: Path, task: str = "walker_run", *, points: int = 11, diagnostics: bool = False, **changes: Any
) -> Config:
    """Rows of a run whose return rises to its method's level of 1000, with noise by seed."""
    config = make_config(task, runs=runs, **changes)
    rng = np.random.default_rng([config.seed, *config.method.encode()])
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "config.json").write_text(json.dumps(config.to_json()))
    (config.folder / "machine.json").write_text(json.dumps({"device": "a machine"}))
    top = 1000 * LEVEL.get(config.method, 0.5) * (0.6 if config.strong_in_target else 1) * rng.normal(1, 0.05)
    evaluations, statistics = [], []
    for f in np.linspace(0, config.frames, points).astype(int).tolist():
        f = f // config.action_repeat * config.action_repeat
        common = {"frames": f, "steps": f // config.action_repeat, "seconds": 10 + f / 100}
        for background in config.eval_backgrounds:
            clips = {"videos": "generated clips", "clips": 8} if background == "video_hard" else {}
            value = top * (1 - np.exp(-3 * f / config.frames)) * (0.7 if clips else 1.0) + rng.normal(0, 15)
            evaluations.append(common | clips | {"background": background, "episodes": 10, "return_mean": float(value),
                                                 "return_std": 1.0, "returns": [float(value)] * 10})  # fmt: skip
        if diagnostics:
            level = LEVEL.get(config.method, 0.5)
            statistics.append(common | {
                "critic_loss_std": 0.9 - level + float(rng.normal(0, 0.01)), "target_std": 0.5 - level / 2,
                "actor_loss_std_across_batch": 5.0 - level, "kl_author": 0.4 - level / 2 + float(rng.normal(0, 0.005)),
                "cosine_actor_shift": 0.3 + level, "cosine_critic_shift": 0.32 + level, "target_mean": 50.0,
            })  # fmt: skip
    write_rows(config.folder / "eval.jsonl", evaluations)
    write_rows(config.folder / "train.jsonl", [{k: evaluations[-1][k] for k in ("frames", "steps", "seconds")}])
    if diagnostics:
        write_rows(config.folder / "diagnostics.jsonl", statistics)
    return config


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
