"""Any Gymnasium environment that shows images and takes bounded continuous actions."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from unmoved.envs.pixels import Action, Image
from unmoved.errors import UserError, unknown

Env = gymnasium.Env[Any, Any]

_DEFAULT_FRAMES = 1000  # time limit of an environment that declares none


class Adapter:
    """A Gymnasium environment as a Simulator. Images are (H, W), (H, W, C) or (C, H, W), or under the key "pixels"."""

    def __init__(self, name: str, env: Env, *, size: int) -> None:
        self._env = env
        self._image: Image | None = None
        self.size = size
        self.episode_frames = (env.spec and env.spec.max_episode_steps) or _DEFAULT_FRAMES

        actions = env.action_space
        if not isinstance(actions, spaces.Box):
            raise UserError(f"{name} has the action space {actions}: only continuous actions (a Box) are supported.")
        if not actions.is_bounded("both"):
            raise UserError(f"{name} has unbounded actions: its Box needs finite bounds.")
        self._low, self._high = actions.low.astype(np.float64), actions.high.astype(np.float64)
        self._actions = actions
        self.action_dim = self._low.size

        images = env.observation_space
        self._is_dict = isinstance(images, spaces.Dict)
        if isinstance(images, spaces.Dict):
            if "pixels" not in images.spaces:
                raise UserError(f"{name} observes {list(images)}: a Dict needs the image under the key 'pixels'.")
            images = images["pixels"]
        shape = images.shape or ()
        if not isinstance(images, spaces.Box) or images.dtype != np.uint8 or len(shape) not in (2, 3):
            raise UserError(
                f"{name} observes {images}, but the observation must be a uint8 image. To see what it renders, write "
                "gymnasium.wrappers.AddRenderObservation(gymnasium.make(ID, render_mode='rgb_array')) into a function "
                "make_env of a module of your own and train my_module:make_env."
            )
        self._channels_first = len(shape) == 3 and shape[-1] not in (1, 3)
        channels = 1 if len(shape) == 2 else shape[0] if self._channels_first else shape[-1]
        if channels not in (1, 3):
            raise UserError(f"{name} observes images of shape {shape}: one frame of 1 or 3 channels is needed.")
        self._name, self._shape = name, shape
        height, width = shape[1:] if self._channels_first else shape[:2]
        self._rows, self._columns = _resampling(height, size), _resampling(width, size)

    def reset(self, seed: int) -> None:
        self._image = self._pixels(self._env.reset(seed=seed)[0])

    def step(self, action: Action) -> tuple[float, bool, bool]:
        unit = (action.astype(np.float64).reshape(self._low.shape) + 1) / 2
        scaled = (self._low + unit * (self._high - self._low)).astype(self._actions.dtype)
        obs, reward, terminated, truncated, _ = self._env.step(scaled)
        self._image = self._pixels(obs)
        return float(reward), bool(terminated), bool(truncated)

    def render(self) -> Image:
        """The last observation, (3, size, size), stretched to a square."""
        assert self._image is not None, "render() before reset()"
        image = np.atleast_3d(self._image)  # (H, W) -> (H, W, 1)
        image = image if self._channels_first else image.transpose(2, 0, 1)
        resized = self._rows @ image.astype(np.float32) @ self._columns.T
        return np.tile((resized + 0.5).astype(np.uint8), (3 // len(image), 1, 1))

    def close(self) -> None:
        self._env.close()

    def _pixels(self, obs: Any) -> Image:
        image = np.asarray(obs["pixels"] if self._is_dict else obs)
        if image.shape != self._shape:
            raise UserError(f"{self._name} showed an image of shape {image.shape}, but declares {self._shape}.")
        return image


def load(name: str) -> Env:
    """The environment called `module:function` or registered with Gymnasium under `name`."""
    module, _, function = name.partition(":")
    if function.isidentifier():
        return _call(module, function)
    if not module or (not function and name not in gymnasium.registry):
        unknown("Gymnasium environment", name, gymnasium.registry)
    try:
        return gymnasium.make(name, disable_env_checker=True)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:  # unknown version, missing dependency
        raise UserError(f"cannot make {name}: {error}") from error


def _call(module: str, function: str) -> Env:
    env = user_function(module, function)()
    if not isinstance(env, gymnasium.Env):
        raise UserError(f"{module}:{function} returned {type(env).__name__}, not a gymnasium.Env.")
    return env


def user_function(module: str, function: str) -> Callable[[], Any]:
    """What a user names as module:function, from the working directory or PYTHONPATH."""
    if os.getcwd() not in sys.path:  # an installed command does not look into the directory it is called from
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise UserError(f"no module '{module}' here ({os.getcwd()}) or on PYTHONPATH.") from error
    if not callable(factory):
        raise UserError(f"module '{module}' has no function '{function}'.")
    return factory


def _resampling(source: int, target: int) -> NDArray[np.float32]:
    """(target, source) weights: bilinear, and wider when shrinking, so that no pixel is skipped."""
    scale = source / target
    centres = (np.arange(target) + 0.5) * scale - 0.5
    distance = np.abs(np.arange(source) - centres[:, None]) / max(scale, 1.0)
    weights = np.maximum(1.0 - distance, 0.0)
    weights /= weights.sum(1, keepdims=True)
    return weights.astype(np.float32)
