"""Train on an environment of your own: any gymnasium.Env whose observation is a uint8 image and whose actions are a
bounded Box. It is resized, stacked and repeated as the configuration says.

    python examples/new_env.py --frames 10k
    unmoved train new_env:make_env --preset cpu      # the same from the command line, in this folder
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro
from numpy.typing import NDArray

from unmoved import make_config
from unmoved.config import Count

Image = NDArray[np.uint8]


class Balance(gymnasium.Env[Image, NDArray[np.float32]]):
    """A bar on a pivot, pushed by a torque in [-2, 2]; reward 1 while it is upright, the end when it has fallen."""

    observation_space = gymnasium.spaces.Box(0, 255, (96, 128, 3), np.uint8)
    action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        super().reset(seed=seed)
        self.angle, self.speed = self.np_random.uniform(-0.3, 0.3, 2)  # radians from upright, radians per second
        return self.picture(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        self.speed += 0.02 * (5 * np.sin(self.angle) + float(action[0]))
        self.angle += 0.02 * self.speed
        fallen = bool(abs(self.angle) > 1.2)
        return self.picture(), float(not fallen), fallen, False, {}

    def picture(self) -> Image:
        x, y = np.arange(128) - 63.5, 95.0 - np.arange(96)[:, None]  # pixels from the pivot, right and up
        along = x * np.sin(self.angle) + y * np.cos(self.angle)
        across = x * np.cos(self.angle) - y * np.sin(self.angle)
        bar = (along >= 0) & (along < 80) & (np.abs(across) < 5)
        return np.where(bar[:, :, None], (240, 200, 80), (30, 40, 60)).astype(np.uint8)


def make_env() -> gymnasium.Env[Image, NDArray[np.float32]]:
    return gymnasium.wrappers.TimeLimit(Balance(), 200)


def main(frames: Count = 10_000, method: str = "drq", seed: int = 1, runs: Path = Path("runs")) -> None:
    from unmoved.train import train  # here, because the environments' processes import this file and need no torch

    train(make_config("new_env:make_env", preset="cpu", method=method, seed=seed, frames=frames, runs=runs))


if __name__ == "__main__":
    tyro.cli(main)
