"""Any simulator as a Gymnasium environment of stacked images, whose episodes can be named and replayed."""

from __future__ import annotations

from typing import Any, Protocol, TypedDict, runtime_checkable

import gymnasium
import numpy as np
from numpy.typing import NDArray

from unmoved.errors import UserError

Image = NDArray[np.uint8]
Action = NDArray[np.float32]


class Simulator(Protocol):
    """Physics, one frame at a time. An episode must be a function of its seed and its actions alone."""

    action_dim: int
    episode_frames: int  # the task's time limit; PixelEnv enforces it
    size: int  # images are size x size

    def reset(self, seed: int) -> None: ...

    def step(self, action: Action) -> tuple[float, bool, bool]:
        """Advance one frame; action in [-1, 1]. Returns reward, terminated, truncated."""
        ...

    def render(self) -> Image:
        """The present frame, (3, size, size), in memory of its own."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """A simulator whose physical state can be read and written within an episode (a snapshot needs neither)."""

    state_size: int

    def get_state(self) -> NDArray[np.float64]: ...

    def set_state(self, state: NDArray[np.float64]) -> None: ...


class Background:
    """What is seen behind the task, and of its scene. This one shows a simulator's picture as it is; others are in
    backgrounds.py. None of it may touch the physics."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    def begin(self, episode: int, seed: int) -> None:
        """After the simulator's reset. What an episode shows must be a function of these two and of its steps."""

    def advance(self) -> None:
        """After each simulator frame, rendered or not."""

    def render(self, step: int) -> Image:
        """The simulator's picture after `step` agent steps of the episode."""
        return self.simulator.render()


class Snapshot(TypedDict):
    """An environment at one moment. Plain numbers and arrays, so any file format will do."""

    seed: int
    episode: int  # -1 before the first reset
    actions: Action  # (T, A), the agent's actions of this episode so far
    obs: Image  # (3 * stack, size, size)


class PixelEnv(gymnasium.Env[Image, Action]):
    """Observations: `stack` frames, oldest first, (3 * stack, size, size). Actions: [-1, 1], held for `action_repeat`.

    Episode k is a function of (seed, stream, k) and the actions taken in it, whatever was simulated before. Streams of
    one seed are independent, so that evaluation never replays the training episodes.
    """

    render_mode = "rgb_array"

    def __init__(
        self,
        simulator: Simulator,
        *,
        seed: int = 0,
        stream: int = 0,
        action_repeat: int = 2,
        stack: int = 3,
        episode_frames: int | None = None,
    ) -> None:
        for name, value in {"action_repeat": action_repeat, "stack": stack, "episode_frames": episode_frames}.items():
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}.")
        self.metadata = {"render_modes": [self.render_mode], "render_fps": 30}
        self.simulator = simulator
        self.background = Background(simulator)
        self.action_repeat = action_repeat
        self.episode_frames = episode_frames or simulator.episode_frames
        shape = (3 * stack, simulator.size, simulator.size)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (simulator.action_dim,), np.float32)
        self._seed, self._stream = seed, stream
        self._episode = -1
        self._frames = 0  # simulator frames since the reset
        self._over = True
        self._actions: list[Action] = []
        self._obs: Image = np.zeros(shape, np.uint8)

    @property
    def episode_steps(self) -> int:
        """Agent steps until the time limit; the last one may be shorter than action_repeat."""
        return -(-self.episode_frames // self.action_repeat)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        """Start the next episode; `seed` starts again from episode 0, options={"episode": k} jumps to episode k."""
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._begin((options or {}).get("episode", self._episode + 1))
        self._obs = np.tile(self._render(), (self._obs.shape[0] // 3, 1, 1))
        return self._obs, {"frames": 0}

    def step(self, action: Action) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        if self._over:
            raise gymnasium.error.ResetNeeded("the episode is over: call reset() before step()")
        before = self._frames
        reward, terminated, truncated = self._advance(action)
        # A new array every step: observations handed out earlier keep their values.
        self._obs = np.concatenate([self._obs[3:], self._render()])
        return self._obs, reward, terminated, truncated, {"frames": self._frames - before}

    def render(self) -> Image:
        """The newest frame, (size, size, 3), as video writers want it."""
        return self._obs[-3:].transpose(1, 2, 0)

    def close(self) -> None:
        self.simulator.close()

    # An episode is a function of its seed and its actions, so these are all a snapshot has to hold: restoring simulates
    # them again, without rendering. That is exact for every deterministic simulator, and it brings back what a copy of
    # the physical state would miss, such as targets and terrain that a task writes into the model at reset. The stack
    # is stored because drawing it would mean stopping at its frames.
    def snapshot(self) -> Snapshot:
        actions = np.array(self._actions, np.float32).reshape(-1, self.simulator.action_dim)
        return {"seed": self._seed, "episode": self._episode, "actions": actions, "obs": self._obs.copy()}

    def restore(self, snapshot: Snapshot) -> Image:
        """Continue where the snapshot was taken; returns its observation."""
        if snapshot["obs"].shape != self._obs.shape:
            raise ValueError(f"snapshot of {snapshot['obs'].shape} images, environment of {self._obs.shape}")
        self._seed = int(snapshot["seed"])
        if snapshot["episode"] < 0:
            self._episode, self._over, self._actions = -1, True, []
        else:
            self._begin(int(snapshot["episode"]))
            for action in snapshot["actions"]:
                self._advance(action)
        self._obs = snapshot["obs"].copy()
        return self._obs

    # A state to store beside every step. What a task wrote into the model at reset (reacher's target) is not in the
    # simulator's, so it begins with the number of its episode: resetting to that one brings the rest back.
    @property
    def state_size(self) -> int:
        """Length of `state`; 0 where the simulator does not give its own."""
        return 1 + self.simulator.state_size if isinstance(self.simulator, Stateful) else 0

    def state(self) -> NDArray[np.float64]:
        assert isinstance(self.simulator, Stateful)
        return np.concatenate([[self._episode], self.simulator.get_state()])

    def return_to(self, state: NDArray[np.float64], obs: Image) -> Image:
        """Continue at a state of any episode, with the frame stack seen there. The time limit counts from here, and no
        snapshot can be taken: it would need the actions that led here."""
        assert isinstance(self.simulator, Stateful)
        self._begin(int(state[0]))
        self.simulator.set_state(state[1:])
        self._obs = obs.copy()
        return self._obs

    def _begin(self, episode: int) -> None:
        entropy = np.random.SeedSequence([self._seed, self._stream, episode])
        physics, scene = (int(n) for n in entropy.generate_state(2))
        self.simulator.reset(physics)
        self.background.begin(episode, scene)
        self._episode, self._frames, self._over, self._actions = episode, 0, False, []

    def _render(self) -> Image:
        return self.background.render(len(self._actions))

    def _advance(self, action: Action) -> tuple[float, bool, bool]:
        action = np.clip(np.asarray(action, np.float32), -1.0, 1.0)
        if action.shape != self.action_space.shape:
            raise ValueError(f"action of shape {action.shape}, expected {self.action_space.shape}")
        self._actions.append(action)
        reward, terminated, truncated = 0.0, False, False
        for _ in range(self.action_repeat):
            frame_reward, terminated, truncated = self.simulator.step(action)
            self.background.advance()
            reward += frame_reward
            self._frames += 1
            # Only the end of the world is terminal; a time limit must be bootstrapped through.
            truncated = not terminated and (truncated or self._frames >= self.episode_frames)
            if terminated or truncated:
                self._over = True
                break
        return reward, terminated, truncated
