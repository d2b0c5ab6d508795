"""Two small tasks drawn with numpy: no physics, no OpenGL. For tests, demonstrations and first runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unmoved.envs.pixels import Action, Image

TASKS = ("toy_reach", "toy_exit")

_SPEED = 0.06  # arena units per frame; the arena is [-1, 1]^2
_RADIUS = 0.12  # of both discs
_VIEW = 1.15  # half the image's width in arena units, so that a disc at the wall is seen whole
_GROUND, _TARGET, _DOT = np.array([(40, 44, 52), (224, 80, 64), (240, 240, 240)], np.float32)  # RGB


class Toy:
    """A dot, steered by its velocity, and a target.

    toy_reach: walls; each frame's reward is 1 - distance, at least 0. Ends at the time limit only.
    toy_exit: no walls; reward 1 and the end on reaching the target, reward 0 and the end on leaving the arena.
    """

    action_dim = 2
    episode_frames = 100
    state_size = 4

    def __init__(self, name: str, *, size: int) -> None:
        self.size = size
        self._exits = name == "toy_exit"
        self._dot = self._target = np.zeros(2)
        self._scale = size / (2 * _VIEW)  # pixels per arena unit
        self._pixels = np.arange(size) + 0.5  # their centres
        self._ground = np.tile(_GROUND[:, None, None], (1, size, size))

    def reset(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._dot, self._target = rng.uniform(-0.9, 0.9, (2, 2))
        while np.linalg.norm(self._dot - self._target) < 0.5:
            self._target = rng.uniform(-0.9, 0.9, 2)

    def step(self, action: Action) -> tuple[float, bool, bool]:
        dot = self._dot + _SPEED * action.astype(np.float64)
        self._dot = dot if self._exits else dot.clip(-1, 1)
        distance = float(np.linalg.norm(self._dot - self._target))
        if not self._exits:
            return max(0.0, 1.0 - distance), False, False
        reached = distance < _RADIUS
        return float(reached), reached or bool(np.abs(self._dot).max() > 1), False

    def render(self) -> Image:
        image = self._ground.copy()
        radius = _RADIUS * self._scale
        for centre, colour in ((self._target, _TARGET), (self._dot, _DOT)):
            x, y = self.size / 2 + self._scale * centre * (1, -1)  # pixels from the left, from the top
            rows, columns = (slice(max(0, int(c - radius - 1)), int(c + radius + 2)) for c in (y, x))
            distance = np.hypot(self._pixels[rows, None] - y, self._pixels[columns] - x)
            cover = (radius + 0.5 - distance).clip(0, 1)  # how much of a pixel the disc covers: smooth edges
            patch = image[:, rows, columns]
            patch += cover * (colour[:, None, None] - patch)
        return (image + 0.5).astype(np.uint8)

    def get_state(self) -> NDArray[np.float64]:
        return np.concatenate([self._dot, self._target])

    def set_state(self, state: NDArray[np.float64]) -> None:
        self._dot, self._target = state[:2].copy(), state[2:].copy()

    def close(self) -> None:
        pass
