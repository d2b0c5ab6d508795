"""The tasks under Gymnasium ids: gymnasium.make("unmoved/walker_walk-v0", action_repeat=4)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from unmoved import envs
from unmoved.envs.pixels import PixelEnv
from unmoved.errors import UserError


def register() -> None:
    """Called by `import unmoved`. Imports no simulator: an id names its task, and `make` is found when it is used."""
    for row in envs.tasks():
        gymnasium.register(
            f"unmoved/{row.name}-v0",
            entry_point=f"{__name__}:make",
            vector_entry_point=f"{__name__}:make_vec",
            kwargs={"task": row.name},
        )


def make(*, seed: int | None = None, render_mode: str | None = PixelEnv.render_mode, **settings: Any) -> PixelEnv:
    """`envs.make` with Gymnasium's conventions: without a seed, here or at reset, nobody knows the episodes."""
    if render_mode not in (None, PixelEnv.render_mode):
        raise UserError(f"render_mode is '{PixelEnv.render_mode}', not '{render_mode}'.")
    return envs.make(seed=_entropy() if seed is None else seed, **settings)


def make_vec(*, num_envs: int, seed: int | None = None, **settings: Any) -> AsyncVectorEnv:
    """One process per environment, each a fresh interpreter: an OpenGL context does not survive a fork. The seeds are
    seed, seed + 1, …, as Gymnasium counts them at reset."""
    first = _entropy() if seed is None else seed
    return AsyncVectorEnv([partial(_worker, seed=first + i, **settings) for i in range(num_envs)], context="spawn")


def _worker(**settings: Any) -> PixelEnv:
    os.environ.setdefault("LP_NUM_THREADS", "1")  # software GL: one core per environment
    return make(**settings)


def _entropy() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])
