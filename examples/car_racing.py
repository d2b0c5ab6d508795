"""Train on Gymnasium's CarRacing from its pixels.

It needs Box2D: pip install 'unmoved[box2d]'. With the preset drq it is a run for a GPU.

    python examples/car_racing.py --frames 500k
    unmoved train CarRacing-v3 --action-repeat 4      # the environment as it is, without the changes below
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium.wrappers import TransformAction, TransformObservation

from unmoved import make_config
from unmoved.config import Count


def make_env() -> gymnasium.Env[Any, Any]:
    """One pedal instead of gas and brake, which random actions would press together; the picture without its panel."""
    env = gymnasium.make("CarRacing-v3")
    two = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)  # steering; pedal, negative to brake
    env = TransformAction(env, lambda a: np.array([a[0], max(a[1], 0.0), max(-a[1], 0.0)], np.float32), two)
    road = gymnasium.spaces.Box(0, 255, (84, 96, 3), np.uint8)
    return TransformObservation(env, lambda image: image[:84], road)


def main(
    frames: Count = 500_000, preset: str = "drq", method: str = "ours", seed: int = 1, runs: Path = Path("runs")
) -> None:
    from unmoved.train import train  # here, because the environments' processes import this file and need no torch

    config = make_config("car_racing:make_env", preset=preset, method=method, seed=seed, frames=frames, runs=runs,
                         action_repeat=4)  # fmt: skip
    train(config)


if __name__ == "__main__":
    tyro.cli(main)
